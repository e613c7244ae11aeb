"""Public models' sizes, by the keys of their `config.json`, so that a plan needs no file.

Each is as published on Hugging Face; keys that do not concern the cache are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

from kvmover.errors import LayoutError

_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"


def _every(layers: int, *kinds: str) -> Sequence[str]:
    """Returns the kinds of `layers` layers: `kinds` repeated in turn."""
    return tuple(islice(cycle(kinds), layers))


def _grouped(layers: int, heads: int, kv_heads: int, head_dim: int = 128) -> Mapping[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _latent(layers: int, **more: Any) -> Mapping[str, Any]:
    return {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **more}


PUBLIC: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v3": _latent(61, num_nextn_predict_layers=1),
    "deepseek-v3.2": _latent(61, index_head_dim=128, num_nextn_predict_layers=1),
    # DeepSeek-V4-Flash: two layers with a window alone, then a row every 4 and every 128 tokens in turn.
    "deepseek-v4": {
        "num_hidden_layers": 43,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "compress_ratios": (0, 0, *islice(cycle((4, 128)), 41)),
        "index_head_dim": 128,
        "num_nextn_predict_layers": 1,
    },
    # Gemma-4-31B: global layers have 4 heads of 512, the others 16 of 256.
    "gemma-4": {
        **_grouped(60, 32, 16, 256),
        "layer_types": _every(60, *[_SLIDING] * 5, _FULL),
        "sliding_window": 1024,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
    },
    "glm-5": _latent(78, index_head_dim=128),
    "gpt-oss": {**_grouped(36, 64, 8, 64), "layer_types": _every(36, _SLIDING, _FULL), "sliding_window": 128},
    "kimi-k2": _latent(61),
    # Kimi-Linear-48B-A3B: layers are counted from 1 there.
    "kimi-linear": _latent(
        27,
        linear_attn_config={
            "kda_layers": tuple(layer for layer in range(1, 27) if layer % 4),
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    ),
    "llama-3-8b": _grouped(32, 32, 8),
    "llama-3-70b": _grouped(80, 64, 8),
    "minimax-m2": _grouped(62, 48, 8),
    "qwen3-235b": _grouped(94, 64, 4),
    "qwen3-next": {
        **_grouped(48, 16, 2, 256),
        "layer_types": _every(48, _LINEAR, _LINEAR, _LINEAR, _FULL),
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
}


def public_config(name: str) -> Mapping[str, Any]:
    """Returns a model's configuration by its name: `deepseek-v3.2`. Raises LayoutError, listing the known names."""
    if name not in PUBLIC:
        raise LayoutError(
            f"{name!r} is neither a file, nor a folder with a config.json, nor one of {', '.join(PUBLIC)}"
        )
    return PUBLIC[name]
