"""A model's cache components are derived from its Hugging Face `config.json`.

Keys and layer kinds of the configuration decide. Of a model's architecture the name alone counts: one that is not known
to keep what its keys say is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvmover.errors import LayoutError
from kvmover.layout.component import Component

Config = Mapping[str, Any]

#: Values of `model_type` whose caches follow from the keys below. Encoders, and decoders with more than these tell (an
#: attention beside a state in each layer, values of another size than keys, heads under other names) are left out.
KNOWN_TYPES = frozenset(
    (
        *("apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3"),
        *("deepseek_v32", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma2"),
        *("gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
        *("glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe"),
        *("granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2"),
        *("internlm3", "kimi_k2", "kimi_linear", "llama", "llama4", "llama4_text", "minicpm3", "minimax_m2"),
        *("ministral", "mistral", "mistral3", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3"),
        *("olmo_hybrid", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
        *("qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
        *("qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2"),
        *("vaultgemma"),
    )
)

#: Values of `layer_types`, by what such a layer keeps. Any other kind is named in the note of a cache.
_FULL = ("full_attention", "indexed_attention", "attention")
_WINDOWED = ("sliding_attention",)
_RECURRENT = ("linear_attention", "mamba")
_NOTHING = ("mlp", "moe")

#: Letters of `hybrid_override_pattern`, a layer each.
_LETTERS = {"*": "full_attention", "M": "mamba", "-": "mlp", "E": "moe"}

#: Index keys are float8 with a float32 scale for 128 of them; latents beside windows are float8 with a scale byte for
#: 64.
_INDEX_BLOCK, _LATENT_BLOCK = 128, 64


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The components of a model's cache; `note` names parts of the model that no component covers."""

    components: tuple[Component, ...]
    note: str = ""


def read_config(path: Path) -> Config:
    """Read a `config.json`, or the one in a folder. Raises LayoutError if it is unreadable or no object of JSON."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LayoutError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise LayoutError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise LayoutError(f"{file} is not a model's config.json: it has no object")
    return cast("dict[str, Any]", found)


def cache_of(config: Config, dtype: str | None = None, known: Collection[str] | None = KNOWN_TYPES) -> ModelCache:
    """Derive the components from the keys of Transformers; `dtype` overrides the configuration's own. Pure.

    Raises LayoutError for a missing key, and for a `model_type` that is not `known`. None takes any by its keys; a
    configuration without a `model_type` is always taken so.

    Multi-head latent attention has `kv_lora_rank`: a latent of that and `qk_rope_head_dim`, 512 + 64 for DeepSeek-V3.

    >>> full = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    >>> [component.token_bytes for component in cache_of(full).components]
    [327680]
    """
    text: Config = {**config, **(config.get("text_config") or {})}
    kind = text.get("model_type")
    if known is not None and kind is not None and kind not in known:
        raise LayoutError(f"nothing says what cache a model of model_type {kind!r} keeps")
    if text.get("is_encoder_decoder"):
        raise LayoutError("is_encoder_decoder is true: the cache of such a model is more than its decoder's")
    name = dtype or str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    kinds = _kinds(text)
    found = (*_kept_by_token(text, kinds, name), *_kept_by_request(text, kinds, name))
    if not found:
        raise LayoutError(f"no layer keeps a cache that is known: layer_types are {', '.join(sorted(set(kinds)))}")
    return ModelCache(found, _note(text, kinds))


def _kinds(text: Config) -> list[str]:
    """Returns the kind of each layer."""
    if pattern := text.get("hybrid_override_pattern"):
        return [_LETTERS.get(letter, letter) for letter in str(pattern)]
    if named := text.get("layer_types") or text.get("layers_block_type"):
        return [str(each) for each in named]
    layers = _size(text, "num_hidden_layers", "n_layer")
    if given := text.get("linear_attn_config"):
        recurrent: Sequence[int] = given.get("kda_layers") or ()
        if not recurrent:
            raise LayoutError("linear_attn_config names no kda_layers, so no layer of linear attention")
        return ["linear_attention" if layer in recurrent else "full_attention" for layer in range(1, layers + 1)]
    if ratios := text.get("compress_ratios"):
        return ["sliding_attention" if ratio < 2 else f"every {ratio} tokens" for ratio in ratios[:layers]]
    return ["full_attention"] * layers


def _kept_by_token(text: Config, kinds: list[str], dtype: str) -> Iterator[Component]:
    """Yields components with a row a token, or every few tokens: attention, latents, windows, index keys."""
    if rates := _rates(text, kinds):
        yield from _compressed(text, kinds, rates)
        return
    full = sum(kind in _FULL for kind in kinds)
    if full and text.get("kv_lora_rank"):
        yield Component.mla(full, _size(text, "kv_lora_rank") + _size(text, "qk_rope_head_dim"), dtype)
    elif full:
        yield Component.attention(full, *_global_heads(text), dtype)
    if full and text.get("index_head_dim"):
        yield Component("index", full, 1, 1, _index_bytes(text), "uint8")
    if windowed := sum(kind in _WINDOWED for kind in kinds):
        yield Component.sliding(windowed, *_heads(text), _size(text, "sliding_window"), dtype)


def _rates(text: Config, kinds: list[str]) -> list[int]:
    """Returns each layer's tokens a row of its compressed cache, 0 without one; empty if no layer has one."""
    named: Mapping[str, int] = text.get("compress_rates") or {}
    rates = [int(kind.split()[1]) if kind.startswith("every ") else named.get(kind, 0) for kind in kinds]
    return rates if any(rates) else []


def _compressed(text: Config, kinds: list[str], rates: list[int]) -> Iterator[Component]:
    """Yields a window of latents for every layer, compressed caches for most, and states of tokens not yet compressed.

    A latent is `head_dim` elements, of which `qk_rope_head_dim` are bfloat16, the rest float8 with a scale of one byte
    for 64, padded to 8: 448 + 2 * 64 + 8 = 584 bytes for DeepSeek-V4. The finest rate overlaps: a row is made of two
    blocks of tokens, and index keys choose among its rows. Waiting tokens are kept in float32, a value and a score
    each; their window is the block.
    """
    dim, rope, window = _size(text, "head_dim"), _size(text, "qk_rope_head_dim"), _size(text, "sliding_window")
    plain = dim - rope
    row = plain + 2 * rope + -(-plain // _LATENT_BLOCK // 8) * 8
    finest = min(filter(None, rates))
    yield Component("sliding", len(kinds), 1, 1, row, "uint8", window)
    for rate in sorted({rate for rate in rates if rate}):
        layers, blocks = rates.count(rate), 2 if rate == finest else 1
        yield Component(f"c{rate}", layers, 1, 1, row, "uint8", row_tokens=rate)
        yield Component(f"c{rate} state", layers, 1, 1, 2 * blocks * dim, "float32", rate * blocks)
        if rate == finest:
            index = _size(text, "index_head_dim")
            yield Component("index", layers, 1, 1, _index_bytes(text), "uint8", row_tokens=rate)
            yield Component("index state", layers, 1, 1, 2 * blocks * index, "float32", rate * blocks)


def _index_bytes(text: Config) -> int:
    """Returns the bytes of an index key with its scale: 128 + 4."""
    keys = _size(text, "index_head_dim")
    return keys + 4 * -(-keys // _INDEX_BLOCK)


def _kept_by_request(text: Config, kinds: list[str], dtype: str) -> Iterator[Component]:
    """Yields the states of recurrent layers and of their convolutions, each part of which is split on its own."""
    layers = sum(kind in _RECURRENT for kind in kinds)
    if not layers:
        return
    temporal, parts, kernel = _recurrent(text)
    heads, dim = temporal
    state = str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or "float32").removeprefix("torch.")
    yield Component.state("temporal", layers, heads, dim, state)
    for name, (heads, dim) in parts.items():
        yield Component.state(f"convolution {name}", layers, heads, dim * (kernel - 1), dtype)


_Heads = tuple[int, int]


def _recurrent(text: Config) -> tuple[_Heads, dict[str, _Heads], int]:
    """Returns (heads, elements of a head) of the temporal state and of each convolution part, and the kernel size."""
    if given := text.get("linear_attn_config"):
        heads, dim = _size(given, "num_heads"), _size(given, "head_dim")
        kernel = _size(given, "short_conv_kernel_size")
        return (heads, dim * dim), dict.fromkeys("qkv", (heads, dim)), kernel
    if text.get("linear_num_heads"):
        heads, dim = _size(text, "linear_num_heads"), _size(text, "linear_head_dim")
        return (heads, dim * dim), dict.fromkeys("qkv", (heads, dim)), _size(text, "linear_conv_kernel_dim")
    if text.get("linear_num_value_heads"):
        keys = _size(text, "linear_num_key_heads"), _size(text, "linear_key_head_dim")
        values = _size(text, "linear_num_value_heads"), _size(text, "linear_value_head_dim")
        parts = {"q": keys, "k": keys, "v": values}
        return (values[0], keys[1] * values[1]), parts, _size(text, "linear_conv_kernel_dim")
    heads, dim = _size(text, "mamba_num_heads", "mamba_n_heads"), _size(text, "mamba_head_dim", "mamba_d_head")
    state = _size(text, "ssm_state_size", "mamba_d_state")
    groups = _size(text, "n_groups", "mamba_n_groups"), state
    return (
        (heads, dim * state),
        {"x": (heads, dim), "B": groups, "C": groups},
        _size(text, "conv_kernel", "mamba_d_conv"),
    )


def _heads(text: Config) -> _Heads:
    """Returns the number of KV heads, and elements of one."""
    queries = _size(text, "num_attention_heads", "n_head")
    heads = 1 if text.get("multi_query") else queries
    heads = _size(text, "num_key_value_heads", default=heads)
    if text.get("head_dim") is not None:
        return heads, _size(text, "head_dim")
    hidden = _size(text, "hidden_size", "n_embd")
    if hidden % queries:
        raise LayoutError(f"{hidden} elements over {queries} heads are no whole head, and there is no head_dim")
    return heads, hidden // queries


def _global_heads(text: Config) -> _Heads:
    """Returns KV heads and elements of one for layers that attend to all tokens: windowed layers may differ."""
    heads, dim = _heads(text)
    if text.get("attention_k_eq_v"):
        heads = _size(text, "num_global_key_value_heads", default=heads)
    return heads, _size(text, "global_head_dim", default=dim)


def _note(text: Config, kinds: list[str]) -> str:
    """Describe the layers that keep a cache and are in no component."""
    known = {*_FULL, *_WINDOWED, *_RECURRENT, *_NOTHING, *(text.get("compress_rates") or ())}
    others = [kind for kind in kinds if kind not in known and not kind.startswith("every ")]
    words: list[str] = []
    if others:
        words.append(f"{len(others)} of {len(kinds)} layers are not in this plan: {', '.join(sorted(set(others)))}")
    if drafts := text.get("num_nextn_predict_layers"):
        words.append(f"layers that predict more than one token are not in this plan: {drafts}")
    if shared := text.get("num_kv_shared_layers"):
        words.append(f"the last {shared} layers share the cache of others, and are counted here all the same")
    return "; ".join(words)


def _size(text: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = text.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"{name} = {value!r} is not a number of at least 1")
            return value
    if default is None:
        raise LayoutError(f"there is no {' or '.join(names)}")
    return default
