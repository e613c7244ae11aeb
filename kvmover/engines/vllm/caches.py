"""vLLM's KV cache tensors are values here, one a layer, which become components, and pools in its one allocation.

vLLM hands each layer over as a view [block, head, token, content] with strides of its own, whatever of its six physical
layouts it runs; K and V of a token and head lie side by side in the content, and a latent is content alone. So a row
is the content, opaque, and no layout is a case of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.layout import DTYPE_BYTES, PACKED_AXES, Component, Layout, Pool, PoolSpec
from kvmover.transport import Memory, NixlTransport, memory_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table. `kind`: vLLM's word. `window`: None where every token matters."""

    layers: tuple[str, ...]
    kind: str
    block_tokens: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer: `shape` and `stride` [page, head, token, content], in elements of `dtype`.

    Pages are the blocks that the attention kernel knows; vLLM's scheduler may know larger ones.
    """

    layer: str
    address: int
    shape: tuple[int, int, int, int]
    stride: tuple[int, int, int, int]
    dtype: str

    @property
    def content(self) -> tuple[int, str]:
        """What a row is: layers whose rows are alike are one component, wherever they lie."""
        return self.shape[3], self.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ComponentCache:
    """Layers of equal rows in one group: a component of the model. `ratio`: pages of a block of the block table.

    `starts`: addresses of the pool's allocations. `layers`: names, in order.
    """

    group: int
    component: Component
    spec: PoolSpec
    starts: tuple[int, ...]
    layers: tuple[str, ...]
    ratio: int

    def blocks(self, blocks: int) -> PoolSpec:
        """The same memory with a page a block, for whoever names content by block. Raises EngineUnsupported.

        The tokens of a block must follow each other evenly: not heads-outermost where kernels split blocks.
        """
        layout = self.spec.layout
        extents = dict(zip(layout.axes, layout.shape, strict=True))
        strides = dict(zip(layout.axes, layout.stride, strict=True))
        if self.ratio > 1 and strides["page"] != strides["token"] * extents["token"]:
            raise EngineUnsupported(
                f"blocks of {self.component.name} are {self.ratio} kernel blocks with heads outermost; the page store"
                f" needs --block-size {extents['token']} or a layout with tokens before heads"
            )
        extents |= {"page": blocks, "token": extents["token"] * self.ratio}
        strides |= {"page": strides["page"] * self.ratio}
        return PoolSpec(
            self.component, Layout(layout.axes, tuple(extents.values()), tuple(strides.values())), self.spec.separate
        )


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """What the caches of a rank do not say of the model: its KV heads and hidden layers, over all ranks; and what bytes
    stand for in a quantised cache: e4m3 and e5m2 are stored alike."""

    kv_heads: int
    layers: int
    kv_dtype: str = ""


#: Kinds of groups whose rows are a token's, and which of them hold the same on every tensor-parallel rank.
_SPLIT, _SHARED = ("full_attention", "sliding_window"), ("mla_attention", "sliding_window_mla")


def number_of(layer: str) -> tuple[int, ...]:
    """Where a layer stands, by the numbers in its name.

    >>> number_of("model.layers.12.self_attn.attn")
    (12,)
    """
    return tuple(int(digits) for digits in re.findall(r"(?<![^.])\d+(?![^.])", layer))


def refuse(groups: Sequence[CacheGroup]) -> None:
    """Raise EngineUnsupported for caches whose rows are not a token's."""
    for group in groups:
        if group.kind not in _SPLIT + _SHARED:
            raise EngineUnsupported(f"kvmover's vLLM connector does not move caches of kind {group.kind}")


def component_caches(
    groups: Sequence[CacheGroup],
    layer_caches: Sequence[LayerCache],
    blocks: int,
    whole: ModelTotals,
    place: ParallelRank,
) -> list[ComponentCache]:
    """All components of a rank's cache, in the order of its groups. Raises EngineUnsupported for what is not rows."""
    refuse(groups)
    by_name = {cache.layer: cache for cache in layer_caches}
    made: list[ComponentCache] = []
    for number, group in enumerate(groups):
        missing = [layer for layer in group.layers if layer not in by_name]
        if missing:
            raise EngineUnsupported(f"no cache was registered for {', '.join(missing)}")
        mine = sorted((by_name[layer] for layer in group.layers), key=lambda s: (number_of(s.layer), s.layer))
        for content in dict.fromkeys(cache.content for cache in mine):
            alike = [cache for cache in mine if cache.content == content]
            made.append(_component_cache(number, group, alike, blocks, whole, place))
    pages = sorted({cache.spec.page_tokens for cache in made})
    if len(pages) > 1:
        raise EngineUnsupported(f"groups whose pages have {pages} tokens; they must be equal")
    return made


def _component_cache(
    number: int,
    group: CacheGroup,
    layer_caches: Sequence[LayerCache],
    blocks: int,
    whole: ModelTotals,
    place: ParallelRank,
) -> ComponentCache:
    if len({(cache.shape, cache.stride) for cache in layer_caches}) > 1:
        raise EngineUnsupported(
            f"caches of {layer_caches[0].layer} and others of {group.kind} {number} do not lie alike"
        )
    pages, heads, tokens, content = layer_caches[0].shape
    ratio, rest = divmod(pages, blocks)
    if rest or tokens * ratio != group.block_tokens:
        raise EngineUnsupported(
            f"cache of {layer_caches[0].layer} has {pages} pages of {tokens} rows for {blocks} blocks of"
            f" {group.block_tokens} tokens; a row must be a token"
        )
    of_model = 1 if group.kind in _SHARED else whole.kv_heads
    held = place.heads(of_model)
    if held.count != heads:
        raise EngineUnsupported(
            f"cache of {layer_caches[0].layer} has {heads} heads; of {of_model} this rank holds {held}"
        )
    layers = len(layer_caches) if place.pp_size == 1 else _layers(layer_caches, whole, place)
    window = None if group.window is None else max(1, group.window - 1)
    quantised = f", {whole.kv_dtype}" * (layer_caches[0].element_bytes == 1)
    name = f"{group.kind} {number}, {content} {layer_caches[0].dtype}{quantised}"
    component = Component(name, layers, 1, of_model, content, layer_caches[0].dtype, window)
    starts = [cache.address for cache in layer_caches]
    stride = _even(starts, layer_caches[0].element_bytes)
    page, head, token, dim = layer_caches[0].stride
    layout = Layout(
        PACKED_AXES, (pages, heads, len(layer_caches), 1, tokens, content), (page, head, stride or 0, 0, token, dim)
    )
    if stride is None:
        return ComponentCache(
            number, component, PoolSpec(component, layout, ("layer",)), tuple(starts), _names(layer_caches), ratio
        )
    return ComponentCache(number, component, PoolSpec(component, layout), (starts[0],), _names(layer_caches), ratio)


def _names(layer_caches: Sequence[LayerCache]) -> tuple[str, ...]:
    return tuple(cache.layer for cache in layer_caches)


def _layers(layer_caches: Sequence[LayerCache], whole: ModelTotals, place: ParallelRank) -> int:
    """Of the whole model, where stages share it: they must have the shares that a Fleet gives them."""
    share = place.layers(whole.layers)
    numbers = [number_of(cache.layer)[:1] for cache in layer_caches]
    if numbers != [(layer,) for layer in share]:
        raise EngineUnsupported(
            f"pipeline stage {place.pp} of {place.pp_size} holds layers {sorted(n[0] for n in numbers if n)}, not"
            f" {share.start} to {share.stop - 1} of {whole.layers}: set VLLM_PP_LAYER_PARTITION to equal stages"
        )
    return whole.layers


def _even(starts: Sequence[int], element_bytes: int) -> int | None:
    """Elements from layer to layer where they lie evenly, else None."""
    steps = {after - before for before, after in pairwise(starts)}
    if len(steps) > 1 or any(step < 0 or step % element_bytes for step in steps):
        return None
    return next(iter(steps), 0) // element_bytes


class BackedTransport(NixlTransport):
    """A transport that has `backing` registered, so that what lies in it needs no registration of its own."""

    def __init__(self, name_hint: str, backing: torch.Tensor) -> None:
        super().__init__(name_hint)
        self._backing = memory_of(backing)
        super().register(self._backing)

    def register(self, memory: Memory) -> None:
        """As Transport.register, but for what lies in the backing, which is registered."""
        if not lies_in(memory, self._backing):
            super().register(memory)


def lies_in(memory: Memory, whole: Memory) -> bool:
    """Whether all of `memory` is part of `whole`, on the same device."""
    inside = whole.address <= memory.address and memory.address + memory.nbytes <= whole.address + whole.nbytes
    return inside and (memory.kind, memory.device) == (whole.kind, whole.device)


def pools_of(caches: Sequence[ComponentCache], backing: torch.Tensor) -> list[Pool]:
    """A pool a component. The memory stays the engine's."""
    first = backing.data_ptr()
    pools: list[Pool] = []
    for cache in caches:
        nbytes = cache.spec.allocation_bytes
        pools.append(Pool(cache.spec, tuple(backing[start - first :][:nbytes] for start in cache.starts)))
    return pools
