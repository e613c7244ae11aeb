"""A model's sizes are read from its configuration, and fleets from the engines' own options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmover import cli
from kvmover.errors import LayoutError
from kvmover.layout import Component
from kvmover.plan.fleet_text import in_our_words
from kvmover.plan.model_config import ModelCache, cache_of
from kvmover.plan.public_models import PUBLIC

LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}
MLA = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def attention(layers: int, heads: int, dim: int) -> Component:
    return Component.attention(layers, heads, dim, "bfloat16")


@pytest.mark.parametrize(
    ("config", "component"),
    [
        (LLAMA, attention(80, 8, 128)),
        (LLAMA | {"head_dim": 64}, attention(80, 8, 64)),
        (MLA, Component.mla(61, 576, "bfloat16")),
        (MLA | {"dtype": "torch.float16"}, Component.mla(61, 576, "float16")),
        ({"text_config": LLAMA}, attention(80, 8, 128)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, attention(12, 12, 64)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "multi_query": True}, attention(12, 1, 64)),
    ],
)
def test_sizes_are_those_of_the_configuration(config: dict[str, Any], component: Component):
    assert cache_of(config) == ModelCache((component,))


def test_an_architecture_that_is_not_known_is_taken_by_its_keys_where_that_is_asked_for():
    assert cache_of(LLAMA | {"model_type": "own"}, known=None) == cache_of(LLAMA | {"model_type": "llama"})


def test_a_dtype_that_is_given_stands_for_the_models_own():
    assert cache_of(LLAMA, "float8_e4m3fn").components[0].row_bytes == 128


def test_layers_with_a_window_and_states_of_recurrent_layers_are_components_beside_attention():
    config = LLAMA | {
        "layer_types": ["full_attention", "sliding_attention", "mamba", "chunked_attention"],
        "sliding_window": 512,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
    }
    cache = cache_of(config)
    assert cache.components == (
        attention(1, 8, 128),
        Component.sliding(1, 8, 128, 512, "bfloat16"),
        Component.state("temporal", 1, 48, 64 * 128, "float32"),
        Component.state("convolution x", 1, 48, 64 * 3, "bfloat16"),
        Component.state("convolution B", 1, 2, 128 * 3, "bfloat16"),
        Component.state("convolution C", 1, 2, 128 * 3, "bfloat16"),
    )
    assert cache.note == "1 of 4 layers are not in this plan: chunked_attention"


def test_layers_are_told_by_the_letters_of_a_hybrid():
    config = LLAMA | {
        "hybrid_override_pattern": "M-M*E",
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    }
    assert [(each.name, each.layers) for each in cache_of(config).components] == [
        ("attention", 1),
        *((name, 2) for name in ("temporal", "convolution x", "convolution B", "convolution C")),
    ]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "there is no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not a number of at least 1"),
        ({"layer_types": ["chunked", "mlp"]}, "no layer keeps a cache that is known: layer_types are chunked, mlp"),
        ({"layer_types": ["mamba"]}, "there is no mamba_num_heads or mamba_n_heads"),
        (LLAMA | {"layer_types": ["sliding_attention"]}, "there is no sliding_window"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512}, "there is no qk_rope_head_dim"),
        (LLAMA | {"model_type": "bert"}, "what cache a model of model_type 'bert' keeps"),
        ({"model_type": "vlm", "text_config": LLAMA | {"model_type": "own"}}, "model of model_type 'own' keeps"),
        (LLAMA | {"model_type": "llama", "is_encoder_decoder": True}, "is_encoder_decoder is true"),
        (MLA | {"linear_attn_config": {"num_heads": 4}}, "linear_attn_config names no kda_layers"),
        (LLAMA | {"hidden_size": 4096, "num_attention_heads": 31}, "4096 elements over 31 heads are no whole head"),
    ],
)
def test_a_configuration_that_does_not_say_is_refused_with_the_key(config: dict[str, Any], reason: str):
    with pytest.raises(LayoutError, match=reason):
        cache_of(config)


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
    status, out = planned(capsys, "--model", str(tmp_path), *fleets)
    found = json.loads(out)
    (plan,) = found.pop("components")
    assert (status, plan) == (0, json.loads(planned(capsys, *sizes, "--src", "tp=4,page=16", *fleets[2:])[1]))
    assert found == {"model": str(tmp_path), "total_bytes": plan["total_bytes"]}
    assert Component(**plan["component"]) == attention(80, 8, 128)
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


def test_a_model_that_is_not_known_is_planned_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "own"}))
    fleets = ("--model", str(tmp_path), "--src", "tp=4", "--dst", "tp=2")
    status, told = planned(capsys, *fleets)
    assert (status, told.count("\n")) == (2, 1)
    assert "model_type 'own'" in told
    assert told.endswith("--assume attention takes it by its keys\n")
    status, told = planned(capsys, *fleets, "--assume", "attention")
    assert status == 0
    assert told.startswith("attention: 80 layers, 8 heads of 128 bfloat16")


@pytest.mark.parametrize("model", PUBLIC)
def test_every_public_model_is_planned_with_the_pages_that_it_gets_by_default(
    model: str, capsys: pytest.CaptureFixture[str]
):
    status, told = planned(capsys, "--model", model, "--src", "tp=4", "--dst", "tp=2", "--json")
    assert status == 0, told
    assert json.loads(told)["total_bytes"] > 0


def test_pages_that_end_within_a_row_are_refused_with_a_size_that_fits(capsys: pytest.CaptureFixture[str]):
    status, told = planned(capsys, "--model", "deepseek-v4", "--src", "tp=4,page=64", "--dst", "tp=2")
    assert status == 2
    assert "take pages of a multiple of 128, or name its rows in `pages`" in told
