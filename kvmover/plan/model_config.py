"""A model's cache is read from its Hugging Face `config.json`: nobody has to look up heads, sizes and layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvmover.errors import LayoutError

#: What a `layer_types` calls layers that keep a row a token of the whole request.
_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of one component, by the options of `kvmover plan`; `note` says what of the model is not in it."""

    kind: str
    layers: int
    dtype: str
    sizes: Mapping[str, int]
    note: str = ""


def read_sizes(path: Path) -> ModelSizes:
    """Of the file, or of the `config.json` in the folder. Raises LayoutError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LayoutError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise LayoutError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise LayoutError(f"{file} is not a model's config.json: it has no object")
    try:
        return sizes_of(cast("dict[str, Any]", found))
    except LayoutError as error:
        raise LayoutError(f"{file}: {error}") from None


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """From the keys that Transformers gives them. Pure. Raises LayoutError naming a key that is missing.

    Multi-head latent attention has `kv_lora_rank`: a latent of that and `qk_rope_head_dim`, 512 + 64 for DeepSeek-V3.
    """
    text: Mapping[str, Any] = {**config, **(config.get("text_config") or {})}
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    layers, note = _layers(text)
    if text.get("kv_lora_rank"):
        latent = _size(text, "kv_lora_rank") + _size(text, "qk_rope_head_dim")
        return ModelSizes("mla", layers, dtype, {"latent_dim": latent}, note)
    queries = _size(text, "num_attention_heads", "n_head")
    heads = 1 if text.get("multi_query") else queries
    heads = _size(text, "num_key_value_heads", default=heads)
    dim = _size(text, "head_dim", default=_size(text, "hidden_size", "n_embd") // queries)
    return ModelSizes("attention", layers, dtype, {"kv_heads": heads, "head_dim": dim}, note)


def _layers(text: Mapping[str, Any]) -> tuple[int, str]:
    """Layers whose cache grows with the request, and a word about the others."""
    layers = _size(text, "num_hidden_layers", "n_layer")
    kinds = [str(each) for each in text.get("layer_types") or ()]
    others = sorted({kind for kind in kinds if kind != _FULL})
    if not others:
        return layers, ""
    full = kinds.count(_FULL)
    if not full:
        raise LayoutError(f"no layer is {_FULL}: layer_types are {', '.join(others)}")
    return full, f"{len(kinds) - full} of {len(kinds)} layers are not in this plan: {', '.join(others)}"


def _size(text: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = text.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"{name} = {value!r} is not a number of at least 1")
            return value
    if default is None:
        raise LayoutError(f"there is no {' or '.join(names)}")
    return default
