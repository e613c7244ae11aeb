"""All names of transformers that the adapter uses, as `Any`: a model's cache and weights, and a Cache in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvmover.engines.common import EngineUnsupported, RequestPages, UnknownWeights, WeightSource, check_loaded, odd_ones
from kvmover.engines.transformers.transformers_contract import CACHE, CACHES, TRANSFORMERS
from kvmover.layout import Component, Pool
from kvmover.transfer import Content, Transfer

TRANSFORMERS.require(CACHE)

_Cache: Any = TRANSFORMERS.find(f"{CACHES}:Cache")
_Layer: Any = TRANSFORMERS.find(f"{CACHES}:CacheLayerMixin")
_DynamicCache: Any = TRANSFORMERS.find(f"{CACHES}:DynamicCache")
_DynamicLayer: Any = TRANSFORMERS.find(f"{CACHES}:DynamicLayer")


def component_of(model: Any) -> tuple[Component, torch.device]:
    """Returns the cache of a model, in the words of all engines, and its device: of one token that is computed.

    Raises EngineUnsupported for a cache whose rows are not K and V of one size, of each token, in each layer.
    """
    config = model.config
    odd = {
        "encoders beside the decoder": bool(config.is_encoder_decoder),
        "inputs beside tokens": model.main_input_name != "input_ids"
        or any(getattr(config, f"{kind}_config", None) is not None for kind in ("vision", "audio")),
        "tensor parallelism": (model.tp_size or 1) > 1,
    }
    probe = _DynamicCache(config=config)
    odd["windows, states or other layers than full attention"] = any(
        type(layer) is not _DynamicLayer for layer in probe.layers
    )
    if asked := odd_ones(odd):
        raise EngineUnsupported(f"{asked} of {model.name_or_path or type(model).__name__}: such KV is not moved")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=probe, use_cache=True)
    held = [(layer.keys, layer.values) for layer in probe.layers]
    rows = {(tuple(each.shape), each.dtype, each.device) for pair in held for each in pair if each is not None}
    if len(rows) != 1 or any(each is None for pair in held for each in pair):
        said = ", ".join(sorted({f"{shape[1]}x{shape[3]} {dtype} on {device}" for shape, dtype, device in rows}))
        raise EngineUnsupported(f"rows of {said} in one cache: K and V of all layers have one form, or are not moved")
    ((shape, dtype, device),) = rows
    if device.type not in ("cpu", "cuda"):
        raise EngineUnsupported(f"a cache on {device}: kvmover moves those of cpu and cuda")
    return Component.attention(len(held), shape[1], shape[3], str(dtype).removeprefix("torch.")), device


def digest_of_weights(model: Any) -> str:
    """Returns the digest of a model's files. Raises UnknownWeights for none, or other weights than those in memory."""
    if not model.name_or_path:
        raise UnknownWeights("the model was loaded from no files")
    quantized = getattr(model.config, "quantization_config", None)
    method = str(getattr(quantized, "quant_method", "unknown")) if quantized is not None else ""
    source = WeightSource(model.name_or_path, getattr(model.config, "_commit_hash", None), quantized=method)
    check_loaded(source.folder(), model.state_dict())
    return source.digest()


class PagedLayer(_Layer):
    """The rows of one layer. `keys` and `values` stay None: they lie in the pages of the cache."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, table: RequestPages, planes: Sequence[torch.Tensor]) -> None:
        _Layer.__init__(self)
        self._table, self._planes = table, planes
        self.tokens, self.is_initialized = 0, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows [1, head, token, dim] into the pages, and return all. Raises EngineUnsupported for several
        sequences.
        """
        if key_states.shape[0] != 1:
            raise EngineUnsupported(f"{key_states.shape[0]} sequences in a cache of one: give each a cache of its own")
        before, self.tokens = self.tokens, self.tokens + key_states.shape[-2]
        pages, rows = self._table.until(self.tokens), torch.arange(before, self.tokens, device=key_states.device)
        at, found = (pages[rows // self._table.page_tokens], rows % self._table.page_tokens), list[torch.Tensor]()
        for plane, new in zip(self._planes, (key_states, value_states), strict=True):
            plane[at] = new[0].detach().transpose(0, 1)
            found.append(plane[pages].flatten(0, 1)[: self.tokens].transpose(0, 1)[None])
        return found[0], found[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the keys that `query_length` new tokens see, and the position of the first."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Returns the number of rows."""
        return self.tokens

    def get_max_length(self) -> int:
        """Returns -1: there is no limit but that of the pool."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last rows."""
        self.tokens -= min(abs(tokens_to_remove), self.tokens)

    def reset(self) -> None:
        """Forget all rows."""
        self.tokens = 0


class PromptCache(_Cache):
    """The KV of one prompt and of what is generated behind it, as `past_key_values` of transformers.

    `prompt`, `content`: the prompt, and its digest with all else that KV depends on. `keys`: hashes of its whole pages
    in the store, of which `stored` are there; () for a prompt of more than tokens. `reason`: why an engine that was
    asked did not give its rows; "" if it did.
    """

    def __init__(self, pool: Pool, table: RequestPages, prompt: list[int], content: Content, keys: list[bytes]) -> None:
        planes = [[pool.plane(layer, kv) for kv in range(2)] for layer in range(pool.spec.component.layers)]
        _Cache.__init__(self, layers=[PagedLayer(table, each) for each in planes])
        self.table, self.prompt, self.content, self.keys = table, prompt, content, keys
        self.stored, self.reason, self.transfers = 0, "", list[Transfer]()

    def landed(self, tokens: int) -> None:
        """Note that the rows of the first `tokens` tokens are in the pages."""
        for layer in self.layers:
            layer.tokens = tokens
