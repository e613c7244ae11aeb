"""vLLM's KV cache tensors are values here, one a layer, which become components, and pools in its one allocation.

vLLM hands each layer over as a view [block, head, token, content] with strides of its own, whatever of its six physical
layouts it runs. What the content is, a block format says; so no layout and no kind of model is a case of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from kvmover.engines.common import EngineUnsupported, ParallelRank, exchanged
from kvmover.engines.vllm.block_format import BlockFormat, BlockSegment, PageView, Rows
from kvmover.layout import DTYPE_BYTES, PACKED_AXES, Component, Fleet, Layout, Pool, PoolSpec
from kvmover.transport import Memory, NixlTransport, memory_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table. `kind`: vLLM's word. `window`: None where every token matters.

    `formats`: of layers whose rows are not a token's as they stand. `row_tokens`: of layers that keep a row of several.
    `scratch_blocks`: at the end of a request's table, where a state is kept a step of speculation, not its own.
    `sides`: equal parts of a token's row that every engine knows: keys and values, or a latent, 1; 0: it has others.
    """

    layers: tuple[str, ...]
    kind: str
    block_tokens: int
    window: int | None = None
    formats: Mapping[str, BlockFormat] = field(default_factory=dict[str, BlockFormat])
    row_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    scratch_blocks: int = 0
    sides: int = 0

    @property
    def is_late(self) -> bool:
        """Whether what its blocks hold of a request is whole only when a prefill has ended."""
        return self.window is not None or self.kind == RECURRENT


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
    def page(self) -> PageView:
        """What a page is, as vLLM views it."""
        _, heads, rows, content = self.shape
        return PageView(heads, rows, content, self.stride[1:], self.dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ComponentCache:
    """Layers of equal rows in one group: a component of the model. `ratio`: pages of a block of the block table.

    `starts`: addresses of the pool's allocations. `layers`: names, in order. `scratch_blocks`: as a CacheGroup's.
    """

    group: int
    component: Component
    spec: PoolSpec
    starts: tuple[int, ...]
    layers: tuple[str, ...]
    ratio: int
    scratch_blocks: int = 0

    def pages(self, table: Sequence[int]) -> list[int]:
        """The page table of a request with this block table: of a state, the one block where it is kept.

        It is the last but those of speculation: blocks before it are states of earlier tokens, or no blocks.
        """
        if self.component.states:
            kept = len(table) - min(self.scratch_blocks, max(len(table) - 1, 0))
            return list(table[:kept][-1:])
        return [block * self.ratio + page for block in table for page in range(self.ratio)]

    def block(self, table: Sequence[int], page: int) -> int:
        """The block that entry `page` of the page table is of."""
        return self.pages(table)[page] if self.component.states else table[page // self.ratio]

    def entries(self, tokens: range, fleet: Fleet) -> range:
        """Entries of the page table that hold what `tokens` want."""
        wanted, rows = self.component.wanted(tokens), self.spec.page_tokens * self.component.cp_parts(fleet.cp)
        return range(wanted.start // rows, -(-wanted.stop // rows))

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
    """What the caches of a rank do not say of the model: its KV heads, over all ranks; and what bytes stand for in a
    quantised cache: e4m3 and e5m2 are stored alike. `drafts`: KV heads of layers that a draft model has.
    """

    kv_heads: int
    kv_dtype: str = ""
    drafts: Mapping[str, int] = field(default_factory=dict[str, int])


#: Kinds of groups whose rows are a token's, and which of them hold the same on every tensor-parallel rank.
_SPLIT, _SHARED = ("full_attention", "sliding_window"), ("mla_attention", "sliding_window_mla")

#: The kind of groups whose blocks hold states.
RECURRENT = "mamba"


def number_of(layer: str) -> tuple[int, ...]:
    """Where a layer stands, by the numbers in its name.

    >>> number_of("model.layers.12.self_attn.attn")
    (12,)
    """
    return tuple(int(digits) for digits in re.findall(r"(?<![^.])\d+(?![^.])", layer))


def refuse(groups: Sequence[CacheGroup]) -> None:
    """Raise EngineUnsupported for caches that cannot be cut."""
    for group in groups:
        if group.kind not in (*_SPLIT, *_SHARED, RECURRENT):
            raise EngineUnsupported(f"kvmover's vLLM connector does not move caches of kind {group.kind}")


def component_caches(
    groups: Sequence[CacheGroup],
    layer_caches: Sequence[LayerCache],
    blocks: int,
    whole: ModelTotals,
    place: ParallelRank,
) -> list[ComponentCache]:
    """All components of a rank's cache, in the order of its groups, with the layers that it holds.

    Raises EngineUnsupported for what is not rows.
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
    """The same memory as engines of any make describe theirs: one component of full attention, K and V apart.

    None where they have no common words for these caches.
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
    """The same as parts of the whole model. `layers`: of it, by component."""
    whole = [replace(cache.component, layers=layers[cache.component.name]) for cache in made]
    return [
        replace(cache, component=component, spec=replace(cache.spec, component=component))
        for cache, component in zip(made, whole, strict=True)
    ]


def fleet_of(caches: Sequence[ComponentCache], place: ParallelRank, run_tokens: int) -> Fleet:
    """The grid of the rank, with the page size of each of these components: the first one's, and those unlike it.

    `run_tokens`: how many tokens in a row a rank holds where ranks share them: one, or a page. Raises
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
    """Layers of a group that are alike in this are one component, or as many as a page has segments."""

    format: BlockFormat
    row_tokens: int
    content: int
    dtype: str
    said: str

    @classmethod
    def of(cls, group: CacheGroup, cache: LayerCache, whole: ModelTotals) -> _LayerKind:
        drafted = cache.layer in whole.drafts
        heads = 1 if group.kind in _SHARED else whole.drafts.get(cache.layer, whole.kv_heads)
        found = group.formats.get(cache.layer, Rows(heads, whole.kv_dtype))
        row_tokens = group.row_tokens.get(cache.layer, 1)
        said = ", a row every {row_tokens} tokens" * (row_tokens > 1) + ", draft" * drafted
        return cls(found, row_tokens, cache.shape[3], cache.dtype, said.format(row_tokens=row_tokens))


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
    rows = 0 if group.kind == RECURRENT else first.shape[2] * kind.row_tokens * ratio
    if rest or rows not in (0, group.block_tokens):
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
        name = f"{group.kind} {number}, {segment.dim} {segment.dtype}" + f", {segment.name}" * bool(segment.name)
        component = Component(
            name + kind.said,
            len(layer_caches),
            segment.kv,
            segment.heads,
            segment.dim,
            segment.dtype,
            window,
            segment.states,
            1 if segment.states else kind.row_tokens,
        )
        spec, starts = _placed(component, segment, layer_caches)
        names = tuple(cache.layer for cache in layer_caches)
        made.append(ComponentCache(number, component, spec, starts, names, ratio, group.scratch_blocks))
    return made


def _placed(
    component: Component, segment: BlockSegment, layer_caches: Sequence[LayerCache]
) -> tuple[PoolSpec, tuple[int, ...]]:
    """Where a segment lies in every page of every layer, and the addresses of its allocations."""
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
