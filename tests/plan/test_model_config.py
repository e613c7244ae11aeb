"""A model's sizes are read from its configuration, and fleets from the engines' own options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmover import cli
from kvmover.errors import LayoutError
from kvmover.plan.fleet_text import in_our_words
from kvmover.plan.model_config import ModelSizes, sizes_of

LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}
MLA = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (LLAMA, ModelSizes("attention", 80, "bfloat16", {"kv_heads": 8, "head_dim": 128})),
        (LLAMA | {"head_dim": 64}, ModelSizes("attention", 80, "bfloat16", {"kv_heads": 8, "head_dim": 64})),
        (MLA, ModelSizes("mla", 61, "bfloat16", {"latent_dim": 576})),
        (MLA | {"dtype": "torch.float16"}, ModelSizes("mla", 61, "float16", {"latent_dim": 576})),
        ({"text_config": LLAMA}, ModelSizes("attention", 80, "bfloat16", {"kv_heads": 8, "head_dim": 128})),
        (
            {"n_layer": 12, "n_head": 12, "n_embd": 768},
            ModelSizes("attention", 12, "bfloat16", {"kv_heads": 12, "head_dim": 64}),
        ),
        (
            LLAMA | {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2},
            ModelSizes(
                "attention",
                2,
                "bfloat16",
                {"kv_heads": 8, "head_dim": 128},
                "2 of 4 layers are not in this plan: sliding_attention",
            ),
        ),
    ],
)
def test_sizes_are_those_of_the_configuration(config: dict[str, Any], sizes: ModelSizes):
    assert sizes_of(config) == sizes


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "there is no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not a number of at least 1"),
        ({"num_hidden_layers": 2, "layer_types": ["mamba", "mamba"]}, "no layer is full_attention"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512}, "there is no qk_rope_head_dim"),
    ],
)
def test_a_configuration_that_does_not_say_is_refused_with_the_key(config: dict[str, Any], reason: str):
    with pytest.raises(LayoutError, match=reason):
        sizes_of(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm: --tensor-parallel-size 8 --block-size 32 -pp 2", "page=32,tp=8,pp=2"),
        ("vllm", "page=16"),
        ("sglang --tp-size=4 --page-size=64", "page=64,tp=4"),
        ("tp=4,page=16", "tp=4,page=16"),
    ],
)
def test_a_fleet_is_told_as_its_engine_is_started(text: str, words: str):
    assert in_our_words(text) == words


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vllm --decode-context-parallel-size 2", "unknown option .*; known are --tensor-parallel-size"),
        ("sglang --tp", "--tp in 'sglang --tp' has no value"),
        ("vllm 'x", "No closing quotation"),
    ],
)
def test_an_option_that_is_not_known_is_refused(text: str, reason: str):
    with pytest.raises(LayoutError, match=reason):
        in_our_words(text)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--tokens", "8192", *arguments])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out + printed.err


def test_a_plan_of_a_model_is_the_one_of_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    fleets = ("--src", "vllm -tp 4", "--dst", "tp=2,page=64,order=HND", "--json")
    sizes = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128")
    found = planned(capsys, "--model", str(tmp_path), *fleets)
    assert found == planned(capsys, *sizes, "--src", "tp=4,page=16", *fleets[2:])
    assert found[0] == 0
    assert planned(capsys, *fleets) == (
        2,
        "kvmover: --layers or --model is needed: nothing says how many layers there are\n",
    )


def test_equal_legs_of_large_fleets_are_one_line(capsys: pytest.CaptureFixture[str]):
    sizes = ("--component", "mla", "--latent-dim", "576", "--layers", "61")
    options = (*sizes, "--src", "tp=64", "--dst", "tp=8,cp=8,page=64")
    status, out = planned(capsys, *options)
    assert status == 0
    assert len(out.splitlines()) < 30
    _, whole = planned(capsys, *options, "--every-leg")
    assert len(whole.splitlines()) > 60
