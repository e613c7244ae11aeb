"""vLLM's KV cache tensors as values, one a layer, which become components, and pools in vLLM's one allocation.

vLLM gives each layer as a view [block, head, token, content] with strides of its own, for all of its six physical
layouts. A block format describes the content, so no layout and no kind of model is a special case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from kvmover.engines.common import EngineUnsupported, ParallelRank, exchanged
from kvmover.engines.vllm.block_format import BlockFormat, BlockSegment, PageView, Rows
from kvmover.layout import DTYPE_BYTES, PACKED_AXES, Codec, Component, Fleet, Layout, Pool, PoolSpec
from kvmover.transport import Memory, NixlTransport, memory_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The codec in which a layer stores the numbers of a token and head. `scales`: of keys and of values, if it has
    any.
    """

    codec: Codec
    scales: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table. `kind` is vLLM's word. `window` is None if every token is attended to.

    `formats`: layers whose rows are not simply a token's. `row_tokens`: layers with one row for several tokens.
    `scratch_blocks`: blocks at the end of a request's table, one state a step of speculation. `sides`: equal parts of a
    token's row known to every engine: 2 for keys and values, 1 for a latent, 0 for any other. `stored`: layers whose
    numbers are encoded by a known codec.
    """

    layers: tuple[str, ...]
    kind: str
    block_tokens: int
    window: int | None = None
    formats: Mapping[str, BlockFormat] = field(default_factory=dict[str, BlockFormat])
    row_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    scratch_blocks: int = 0
    sides: int = 0
    stored: Mapping[str, StoredRows] = field(default_factory=dict[str, "StoredRows"])

    @property
    def is_late(self) -> bool:
        """Returns True if a request's blocks are complete only when its prefill has ended."""
        return self.window is not None or self.kind in ONE_BLOCK


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer: `shape` and `stride` [page, head, token, content], in elements of `dtype`.

    Pages are the blocks of the attention kernel; vLLM's scheduler may have larger ones.
    """

    layer: str
    address: int
    shape: tuple[int, int, int, int]
    stride: tuple[int, int, int, int]
    dtype: str

    @property
    def page(self) -> PageView:
        """Returns a page as vLLM views it."""
        _, heads, rows, content = self.shape
        return PageView(heads, rows, content, self.stride[1:], self.dtype)

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of one element of `dtype`."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ComponentCache:
    """Layers of equal rows in one group: a component of the model. `ratio` is the number of pages in a block of the
    block table.

    `starts` has the addresses of the pool's allocations, `layers` their names, in order. `scratch_blocks` is as in a
    CacheGroup.
    """

    group: int
    component: Component
    spec: PoolSpec
    starts: tuple[int, ...]
    layers: tuple[str, ...]
    ratio: int
    scratch_blocks: int = 0

    def pages(self, table: Sequence[int]) -> list[int]:
        """Returns the page table of a request with this block table; for a state, the one block that holds it.

        That block is the last before those of speculation: blocks before it are states of earlier tokens, or null
        blocks.
        """
        if self.component.states:
            kept = len(table) - min(self.scratch_blocks, max(len(table) - 1, 0))
            return list(table[:kept][-1:])
        return [block * self.ratio + page for block in table for page in range(self.ratio)]

    def block(self, table: Sequence[int], page: int) -> int:
        """Returns the block that contains entry `page` of the page table."""
        return self.pages(table)[page] if self.component.states else table[page // self.ratio]

    def entries(self, tokens: range, fleet: Fleet) -> range:
        """Returns the entries of the page table that hold the rows wanted for `tokens`."""
        wanted, rows = self.component.wanted(tokens), self.spec.page_tokens * self.component.cp_parts(fleet.cp)
        return range(wanted.start // rows, -(-wanted.stop // rows))

    def blocks(self, blocks: int) -> PoolSpec:
        """Returns the same memory with a page a block, for content named by block. Raises EngineUnsupported.

        The tokens of a block must be evenly spaced, so heads must not be outermost if kernels split blocks.
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
            self.component,
            Layout(layout.axes, tuple(extents.values()), tuple(strides.values())),
            self.spec.separate,
            self.spec.scales,
        )


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """The properties of the model that a rank's caches do not show: its KV heads over all ranks, and the format of a
    quantised cache's bytes, since e4m3 and e5m2 are stored alike. `drafts` has the KV heads of a draft model's layers.
    """

    kv_heads: int
    kv_dtype: str = ""
    drafts: Mapping[str, int] = field(default_factory=dict[str, int])


#: Kinds of groups whose rows are a token's: split by heads, or equal on every tensor-parallel rank.
_SPLIT, _SHARED = ("full_attention", "sliding_window"), ("mla_attention", "sliding_window_mla")

#: Kinds of groups in which a request has one block: a state, or a ring of the tokens waiting to be compressed, which
#: vLLM does not name.
RING = "ring"
ONE_BLOCK = ("mamba", RING)


def number_of(layer: str) -> tuple[int, ...]:
    """Returns the numbers in a layer's name, which order the layers.

    >>> number_of("model.layers.12.self_attn.attn")
    (12,)
    """
    return tuple(int(digits) for digits in re.findall(r"(?<![^.])\d+(?![^.])", layer))


def refuse(groups: Sequence[CacheGroup]) -> None:
    """Raise EngineUnsupported for caches that cannot be cut."""
    for group in groups:
        if group.kind not in (*_SPLIT, *_SHARED, *ONE_BLOCK):
            raise EngineUnsupported(f"kvmover's vLLM connector does not move caches of kind {group.kind}")


def component_caches(
    groups: Sequence[CacheGroup],
    layer_caches: Sequence[LayerCache],
    blocks: int,
    whole: ModelTotals,
    place: ParallelRank,
) -> list[ComponentCache]:
    """Returns all components of a rank's cache, in the order of its groups, with this rank's layers.

    Raises EngineUnsupported for content without regular rows.
    """
    refuse(groups)
    by_name = {cache.layer: cache for cache in layer_caches}
    made: list[ComponentCache] = []
    for number, group in enumerate(groups):
        missing = [layer for layer in group.layers if layer not in by_name]
        if missing:
            raise EngineUnsupported(f"no cache was registered for {', '.join(missing)}")
        mine = sorted((by_name[layer] for layer in group.layers), key=lambda s: (number_of(s.layer), s.layer))
        kinds = [_LayerKind.of(group, cache, whole) for cache in mine]
        for kind in dict.fromkeys(kinds):
            alike = [cache for cache, its in zip(mine, kinds, strict=True) if its == kind]
            made += _component_caches(number, group, kind, alike, blocks, place)
    return made


def exchanged_caches(caches: Sequence[ComponentCache], groups: Sequence[CacheGroup]) -> list[ComponentCache] | None:
    """Returns the same memory in the form common to all engines: one component of full attention, K and V apart.

    Returns None if there is no common form for these caches.
    """
    if len(caches) != 1 or not groups[0].sides:
        return None
    (cache,) = caches
    component = exchanged(cache.component, groups[0].sides)
    if component is None:
        return None
    layout = cache.spec.layout
    extents = dict(zip(layout.axes, layout.shape, strict=True)) | {"kv": component.kv, "dim": component.dim}
    strides = dict(zip(layout.axes, layout.stride, strict=True)) | {"kv": component.dim if component.kv > 1 else 0}
    layout = Layout(layout.axes, tuple(extents.values()), tuple(strides.values()))
    return [replace(cache, component=component, spec=PoolSpec(component, layout, cache.spec.separate))]


def of_all_stages(made: Sequence[ComponentCache], layers: Mapping[str, int]) -> list[ComponentCache]:
    """Returns these caches as parts of the whole model, which has `layers` of each component."""
    whole = [replace(cache.component, layers=layers[cache.component.name]) for cache in made]
    return [
        replace(cache, component=component, spec=replace(cache.spec, component=component))
        for cache, component in zip(made, whole, strict=True)
    ]


def fleet_of(caches: Sequence[ComponentCache], place: ParallelRank, run_tokens: int) -> Fleet:
    """Returns the rank's grid with the page size of each component: the first one's, and those that differ from it.

    `run_tokens` is the number of consecutive tokens on one context-parallel rank: one, or a page. Raises
    EngineUnsupported for others.
    """
    sizes = sorted({cache.spec.page_tokens for cache in caches})
    if place.cp_size > 1 and run_tokens > 1 and sizes != [run_tokens]:
        raise EngineUnsupported(f"runs of {run_tokens} tokens on each of {place.cp_size} ranks, in pages of {sizes}")
    tokens = {
        cache.component.name: cache.spec.page_tokens * cache.component.row_tokens
        for cache in caches
        if not cache.component.states
    }
    usual = next(iter(tokens.values()), 1)
    unlike = {c.component.name: c.spec.page_tokens for c in caches if tokens.get(c.component.name, usual) != usual}
    return place.fleet(usual, unlike)


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """The properties by which layers of a group form one component, or one a segment of the page."""

    format: BlockFormat
    row_tokens: int
    content: int
    dtype: str
    said: str
    codec: Codec | None

    @classmethod
    def of(cls, group: CacheGroup, cache: LayerCache, whole: ModelTotals) -> _LayerKind:
        drafted = cache.layer in whole.drafts
        heads = 1 if group.kind in _SHARED else whole.drafts.get(cache.layer, whole.kv_heads)
        found = group.formats.get(cache.layer, Rows(heads, whole.kv_dtype))
        row_tokens = group.row_tokens.get(cache.layer, 1)
        said = ", a row every {row_tokens} tokens" * (row_tokens > 1) + ", draft" * drafted
        stored = group.stored.get(cache.layer)
        content = cache.shape[3] * cache.element_bytes
        known = stored.codec if stored and isinstance(found, Rows) and stored.codec.row_bytes == content else None
        return cls(found, row_tokens, cache.shape[3], cache.dtype, said.format(row_tokens=row_tokens), known)


def _component_caches(
    number: int,
    group: CacheGroup,
    kind: _LayerKind,
    layer_caches: Sequence[LayerCache],
    blocks: int,
    place: ParallelRank,
) -> list[ComponentCache]:
    first = layer_caches[0]
    if len({(cache.shape, cache.stride) for cache in layer_caches}) > 1:
        raise EngineUnsupported(f"caches of {first.layer} and others of {group.kind} {number} do not lie alike")
    ratio, rest = divmod(first.shape[0], blocks)
    rows = first.shape[2] * kind.row_tokens * ratio
    is_whole = ratio == 1 if group.kind in ONE_BLOCK else rows == group.block_tokens
    if rest or not is_whole:
        each = "a token" if kind.row_tokens == 1 else f"{kind.row_tokens} tokens"
        raise EngineUnsupported(
            f"cache of {first.layer} has {first.shape[0]} pages of {first.shape[2]} rows for {blocks} blocks of"
            f" {group.block_tokens} tokens; a row must be {each}"
        )
    window = None if group.window is None else max(1, group.window - 1)
    made: list[ComponentCache] = []
    for segment in kind.format.segments(first.page):
        held = place.heads(segment.heads)
        if held.count != segment.held:
            what = f"cache of {first.layer}" + f", {segment.name}," * bool(segment.name)
            raise EngineUnsupported(f"{what} has {segment.held} heads; of {segment.heads} this rank holds {held}")
        codec = kind.codec
        dim, dtype, told = (codec.dim, codec.values, "") if codec else (segment.dim, segment.dtype, segment.name)
        component = Component(
            f"{group.kind} {number}, {dim} {dtype}" + f", {told}" * bool(told) + kind.said,
            len(layer_caches),
            segment.kv,
            segment.heads,
            dim,
            dtype,
            window,
            segment.states,
            1 if segment.states else kind.row_tokens,
        )
        if codec:  # elements of one byte, as the segment's are
            component = component.kept_as(codec)
        spec, starts = _placed(component, segment, layer_caches)
        if codec and codec.scales:
            scales = (group.stored[cache.layer].scales for cache in layer_caches)
            spec = replace(spec, scales=tuple(scale for each in scales for scale in each))
        names = tuple(cache.layer for cache in layer_caches)
        made.append(ComponentCache(number, component, spec, starts, names, ratio, group.scratch_blocks))
    return made


def _placed(
    component: Component, segment: BlockSegment, layer_caches: Sequence[LayerCache]
) -> tuple[PoolSpec, tuple[int, ...]]:
    """Returns a segment's place in every page of every layer, and the addresses of its allocations."""
    first, size = layer_caches[0], component.element_bytes
    starts = [cache.address + segment.start_bytes for cache in layer_caches]
    page_bytes = first.stride[0] * first.element_bytes
    if page_bytes % size:
        raise EngineUnsupported(f"pages of {first.layer} are {page_bytes} bytes apart, {segment.dtype} has {size}")
    between = _even(starts, size)
    kv, head, row = segment.strides
    rows = 1 if segment.states else first.shape[2]
    layout = Layout(
        PACKED_AXES,
        (first.shape[0], segment.held, len(layer_caches), segment.kv, rows, segment.dim),
        (page_bytes // size, head, between or 0, kv, row, 1),
    )
    if between is None:
        return PoolSpec(component, layout, ("layer",)), tuple(starts)
    return PoolSpec(component, layout), (starts[0],)


def _even(starts: Sequence[int], element_bytes: int) -> int | None:
    """Returns the distance between layers in elements if it is constant, else None."""
    steps = {after - before for before, after in pairwise(starts)}
    if len(steps) > 1 or any(step < 0 or step % element_bytes for step in steps):
        return None
    return next(iter(steps), 0) // element_bytes


class BackedTransport(NixlTransport):
    """A transport with `backing` registered, so that memory within it needs no registration of its own."""

    def __init__(self, name_hint: str, backing: torch.Tensor) -> None:
        super().__init__(name_hint, device=backing.device)
        self._backing = memory_of(backing)
        super().register(self._backing)

    def register(self, memory: Memory) -> None:
        """Register memory, unless it lies in the backing."""
        if not lies_in(memory, self._backing):
            super().register(memory)


def lies_in(memory: Memory, whole: Memory) -> bool:
    """Returns True if all of `memory` is part of `whole`, on the same device."""
    inside = whole.address <= memory.address and memory.address + memory.nbytes <= whole.address + whole.nbytes
    return inside and (memory.kind, memory.device) == (whole.kind, whole.device)


def pools_of(caches: Sequence[ComponentCache], backing: torch.Tensor) -> list[Pool]:
    """Returns one pool a component. The memory stays the engine's."""
    first = backing.data_ptr()
    pools: list[Pool] = []
    for cache in caches:
        nbytes = cache.spec.allocation_bytes
        pools.append(Pool(cache.spec, tuple(backing[start - first :][:nbytes] for start in cache.starts)))
    return pools
