"""The pages of the engines: every option of an adapter has its row: the setting it stands for, and what is so unset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmover.config import Settings, keys
from kvmover.config.load import toml
from kvmover.config.settings import value_of
from kvmover.engines.common import RANK_DEFAULTS, RANK_KEYS, ContentOptions
from kvmover.engines.sglang import sglang_options as sglang
from kvmover.engines.transformers import transformers_options as transformers
from kvmover.engines.vllm import vllm_options as vllm

DOCS = Path(__file__).parent.parent.parent / "docs"
ADAPTERS = [
    pytest.param("vllm.md", vllm.ConnectorOptions, vllm.KEYS, vllm.DEFAULTS, id="vllm"),
    pytest.param("sglang.md", sglang.StoreOptions, sglang.STORE_KEYS, Settings(), id="sglang"),
    pytest.param("transformers.md", transformers.TransformersOptions, RANK_KEYS, RANK_DEFAULTS, id="transformers"),
]


@pytest.mark.parametrize(("page", "own", "stands_for", "defaults"), ADAPTERS)
def test_every_option_of_an_adapter_has_its_row(
    page: str, own: Any, stands_for: Mapping[str, str], defaults: Settings
) -> None:
    table = re.search(r"^\| Option \| Setting \| Unset .*\n\|[-|]*\n((?:\|.*\n)+)", (DOCS / page).read_text(), re.M)
    assert table
    rows = [re.split(r" *\| *", line)[1:4] for line in table[1].splitlines()]
    unset = {key.name: toml(value_of(defaults, key)) for key in keys()}
    assert {name: cells for option, *cells in rows for name in words(option) if cells[0]} == {
        name: [f"`{setting}`", f"`{unset[setting]}`"] for name, setting in stands_for.items()
    }
    fields = {field.name for field in msgspec.structs.fields(own)}
    assert {name for option, *_ in rows for name in words(option)} == {*stands_for, *fields}


def words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_text_of_a_setting_names_the_default_that_an_adapter_has_instead() -> None:
    other = {key: value_of(vllm.DEFAULTS, key) for key in keys() if value_of(vllm.DEFAULTS, key) != key.default}
    assert {key.name for key in other} == {"mover.deadline_s", "mover.verb"}
    for key, value in other.items():
        said = f"{value:g}" if isinstance(value, float) else str(value)
        assert f"in vLLM {said}" in key.text


def test_the_page_of_vllm_names_every_option_of_its_tier() -> None:
    section = re.search(r"^## Tier\n(.*?)^## ", (DOCS / "vllm.md").read_text(), re.M | re.S)
    assert section
    fields = {field.name for field in msgspec.structs.fields(vllm.TierOptions)}
    assert {*vllm.STORE_KEYS, *fields} <= {*words(section[1])}


def test_the_page_of_vllm_names_every_option_of_its_tier_of_peers() -> None:
    section = re.search(r"^## Peers\n(.*?)^## ", (DOCS / "vllm.md").read_text(), re.M | re.S)
    assert section
    fields = {field.name for field in msgspec.structs.fields(ContentOptions)}
    assert {*vllm.PEER_KEYS, *fields} <= {*words(section[1])}
