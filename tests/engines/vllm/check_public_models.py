"""The sizes of public models are those that Transformers has for them, where its defaults are the published ones."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # pyright: ignore[reportMissingImports]

from kvmover.plan.model_config import cache_of
from kvmover.plan.public_models import public_config

DEFAULTS = {
    "deepseek_v3": "deepseek-v3",
    "deepseek_v32": "deepseek-v3.2",
    "glm_moe_dsa": "glm-5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "qwen3_next": "qwen3-next",
}


@pytest.mark.parametrize(("transformers", "name"), DEFAULTS.items())
def test_the_cache_of_a_public_model_is_that_of_its_configuration_class(transformers: str, name: str) -> None:
    assert cache_of(CONFIG_MAPPING[transformers]().to_dict()).components == cache_of(public_config(name)).components


def test_a_compressed_cache_is_read_from_the_names_of_layers_too() -> None:
    config = CONFIG_MAPPING["deepseek_v4"]().to_dict()
    named = {each.name: each for each in cache_of(config).components}
    of_ratios = {each.name: each for each in cache_of(public_config("deepseek-v4")).components}
    kinds = config["layer_types"]
    assert named["c4"].layers == kinds.count("compressed_sparse_attention")
    assert named["c128"].layers == kinds.count("heavily_compressed_attention")
    assert {name: each.row_bytes for name, each in named.items()} == {
        name: each.row_bytes for name, each in of_ratios.items()
    }
