"""The names of transformers that the adapter uses."""

from __future__ import annotations

from kvmover.engines.common import Contract, Need

#: The only part of the adapter, as messages call it.
CACHE = "cache"

CACHES = "transformers.cache_utils"

#: The contract with transformers.
TRANSFORMERS = Contract(
    "transformers",
    "transformers",
    "kvmover.engines.transformers",
    {CACHE: ("5.19",)},
    (
        Need(f"{CACHES}:Cache", (CACHE,), ("layers", "get_seq_length", "get_mask_sizes", "crop", "is_compileable")),
        Need(
            f"{CACHES}:CacheLayerMixin",
            (CACHE,),
            (
                *("lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length", "reset"),
                *("is_compileable", "is_croppable", "supports_early_init"),
            ),
        ),
        Need(f"{CACHES}:DynamicCache", (CACHE,), ("config",)),
        Need(f"{CACHES}:DynamicLayer", (CACHE,), ("keys", "values")),
        Need("transformers:PreTrainedModel", (CACHE,), ("name_or_path", "tp_size", "main_input_name")),
        Need("transformers:PreTrainedConfig", (CACHE,), ("is_encoder_decoder",)),
        Need("transformers:GenerationMixin", (CACHE,), ("generate",)),
        Need("transformers:GenerationConfig", (CACHE,), ("update",)),
    ),
)
