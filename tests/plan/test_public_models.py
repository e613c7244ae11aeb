"""Public models are planned by their names, and what a request of each holds is what one counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvmover import cli
from kvmover.plan.model_config import cache_of
from kvmover.plan.public_models import PUBLIC

TOKENS = 8192

#: Bytes that a request of 8,192 tokens holds in each component, counted from what the model's authors published.
HELD = {
    "deepseek-v3": {"mla": 61 * TOKENS * 1152},
    "deepseek-v3.2": {"mla": 61 * TOKENS * 1152, "index": 61 * TOKENS * 132},
    "deepseek-v4": {
        "sliding": 43 * 128 * 584,
        "c4": 21 * TOKENS // 4 * 584,
        "c4 state": 21 * 8 * 4 * 2048,
        "index": 21 * TOKENS // 4 * 132,
        "index state": 21 * 8 * 4 * 512,
        "c128": 20 * TOKENS // 128 * 584,
        "c128 state": 20 * 128 * 4 * 1024,
    },
    "gemma-4": {"attention": 10 * 2 * 4 * 512 * 2 * TOKENS, "sliding": 50 * 2 * 16 * 256 * 2 * 1024},
    "glm-5": {"mla": 78 * TOKENS * 1152, "index": 78 * TOKENS * 132},
    "gpt-oss": {"attention": 18 * 2 * 8 * 64 * 2 * TOKENS, "sliding": 18 * 2 * 8 * 64 * 2 * 128},
    "kimi-k2": {"mla": 61 * TOKENS * 1152},
    "kimi-linear": {
        "mla": 7 * TOKENS * 1152,
        "temporal": 20 * 32 * 128 * 128 * 4,
        **{f"convolution {part}": 20 * 32 * 128 * 3 * 2 for part in "qkv"},
    },
    "llama-3-8b": {"attention": 32 * 4096 * TOKENS},
    "llama-3-70b": {"attention": 327_680 * TOKENS},
    "minimax-m2": {"attention": 62 * 4096 * TOKENS},
    "qwen3-235b": {"attention": 94 * 2048 * TOKENS},
    "qwen3-next": {
        "attention": 12 * 2 * 2 * 256 * 2 * TOKENS,
        "temporal": 36 * 32 * 128 * 128 * 4,
        "convolution q": 36 * 16 * 128 * 3 * 2,
        "convolution k": 36 * 16 * 128 * 3 * 2,
        "convolution v": 36 * 32 * 128 * 3 * 2,
    },
}


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--tokens", str(TOKENS), "--src", "tp=4,page=256", "--dst", "page=128", *arguments])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_request_holds_is_what_one_counts(name: str):
    components = cache_of(PUBLIC[name]).components
    held = {each.name: len(each.wanted(range(TOKENS))) * each.token_bytes for each in components}
    assert held == HELD[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_model_is_planned_by_its_name(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "plan.svg"
    status, out, err = planned(capsys, "--model", name, "--json", "--svg", str(picture))
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert {plan["component"]["name"]: plan["total_bytes"] for plan in found["components"]} == HELD[name]
    assert found["total_bytes"] == sum(HELD[name].values())
    titles = ElementTree.parse(picture).getroot().itertext()
    assert {text.split(":")[0] for text in titles} >= set(HELD[name])


def test_a_table_ends_with_what_the_components_are_together(capsys: pytest.CaptureFixture[str]):
    _, out, _ = planned(capsys, "--model", "deepseek-v3.2")
    *_, mla, index, together, note = out.splitlines()
    assert mla.split() == ["mla", "bfloat16", "61", "8,192", "tokens", "549", "MiB", "4"]
    assert index.split() == ["index", "uint8", "61", "8,192", "tokens", "62.9", "MiB", "4"]
    assert together == "together: 612 MiB"
    assert note == "layers that predict more than one token are not in this plan: 1"


def test_one_component_of_a_model_is_planned_alone_and_may_be_resized(capsys: pytest.CaptureFixture[str]):
    _, out, _ = planned(capsys, "--model", "gpt-oss", "--component", "sliding", "--layers", "2", "--json")
    (plan,) = json.loads(out)["components"]
    assert plan["total_bytes"] == HELD["gpt-oss"]["sliding"] // 9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--model", "gpt-5"), "'gpt-5' is neither a file, nor a folder with a config.json, nor one of deepseek-v3,"),
        (("--model", "gpt-oss", "--component", "mla"), "--component mla, and gpt-oss is of attention, sliding"),
        (("--model", "gpt-oss", "--layers", "4"), "--layers 4 is a size of one component, and the model has attention"),
        (
            ("--model", "glm-5", "--component", "mla", "--kv-heads", "4"),
            "--kv-heads 4 has no meaning for component mla",
        ),
    ],
)
def test_what_no_model_has_is_refused_with_what_it_has(
    options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
):
    status, out, err = planned(capsys, *options)
    assert (status, out) == (2, "")
    assert reason in err
