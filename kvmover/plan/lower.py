"""Lowering turns a leg with page tables into strided boxes, byte runs and descriptors. Integers in, integers out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvmover.errors import PlanError
from kvmover.layout.codec import Codec
from kvmover.layout.component import Component
from kvmover.layout.fleet import Shard
from kvmover.layout.layout import Dim, Layout, coalesce
from kvmover.layout.pool import PoolSpec
from kvmover.layout.span import Span
from kvmover.plan.legs import Leg
from kvmover.plan.units import Offsets, Paging, Units, cut
from kvmover.vocabulary import PACKED_ORDER

#: Float32 scales of planes and of the parts of their rows.
Scales = npt.NDArray[np.float32]

#: Page ids [page] of a pool.
Ids = Sequence[int] | npt.NDArray[np.int64]


class Held(msgspec.Struct, frozen=True):
    """One rank's pool and its Shard of the request: together they turn a logical coordinate into an address."""

    spec: PoolSpec
    shard: Shard

    def paging(self) -> Paging:
        """Returns the rank's positions and tokens a page. Raises PlanError for a rank without positions."""
        if self.shard.positions is None:
            raise PlanError("a rank that holds no position of the request has no leg")
        return Paging(self.shard.positions, self.spec.page_tokens)


class BoxSide(msgspec.Struct, frozen=True, eq=False):
    """One side of a box. Address of a row: `base[allocation[plane]] + offset[plane] + unit + head * .. + token * ..`.

    `allocation`, `offset` [plane]; `units` [unit]; all int64, offsets and strides in bytes.
    """

    allocation: Offsets
    offset: Offsets
    units: Offsets
    head_bytes: int
    token_bytes: int


class Recode(msgspec.Struct, frozen=True, eq=False):
    """A change of form for the rows of a box. `src_scales`, `dst_scales` [plane, scaled part]."""

    reads: Codec
    writes: Codec
    src_scales: Scales
    dst_scales: Scales


class Box(msgspec.Struct, frozen=True, eq=False):
    """A box of planes x units x heads x tokens rows of `row_bytes`, each contiguous at both ends: the input of every
    route.

    `recode`: None where the bytes are the same at both ends; else `row_bytes` are those of the source. `filled`: see
    `Region`.
    """

    src: BoxSide
    dst: BoxSide
    heads: int
    tokens: int
    row_bytes: int
    recode: Recode | None = None
    filled: bool = False

    @property
    def unit_bytes(self) -> int:
        """The payload bytes of one unit: all its planes, heads and tokens."""
        return len(self.src.offset) * self.heads * self.tokens * self.row_bytes

    @property
    def nbytes(self) -> int:
        """The payload bytes of the box."""
        return len(self.src.units) * self.unit_bytes


def units_of(leg: Leg, src: Held, dst: Held) -> tuple[Units, ...]:
    """Cut the leg's tokens into pieces inside one page on both sides. Both peers compute the same pieces."""
    return cut(leg.positions, src.paging(), dst.paging())


def page_ids(held: Held, tokens_at: Offsets, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the pool's page for each token index [n] of a rank's positions. `pages` [page] is its page table of the
    request.

    Raises PlanError if the table is too short or names a page outside the pool.
    """
    page = tokens_at // held.spec.page_tokens
    try:
        return _inside(held.spec, np.asarray(pages, np.int64).take(page))
    except IndexError:
        last = int(page.max())
        raise PlanError(f"page table of {len(pages)} pages is too short for page {last} of the request") from None


def _inside(spec: PoolSpec, ids: Offsets) -> Offsets:
    """Returns `ids`. Raises PlanError if one is outside the pool."""
    if ids.size and int(np.maximum.reduce(ids.view(np.uint64))) >= spec.pages:  # below 0 is very large
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        raise PlanError(f"page id {bad} is outside a pool of {spec.pages} pages")
    return ids


def pool_place(held: Held, leg: Leg, tokens_at: Offsets, pages: npt.NDArray[np.int64]) -> BoxSide:
    """Locate `leg` in a pool by the rank's page table. Raises PlanError as `page_ids` does."""
    cut = pool_cut(held, leg)
    return cut.place(cut.units(held, tokens_at, pages))


def pool_cut(held: Held, leg: Leg) -> PoolCut:
    """Returns the addresses of the leg's layers and heads in a pool, independent of its pages."""
    return _pool_cut(held.spec, held.shard.layers, held.shard.heads, leg.layers, leg.heads)


class PoolCut(msgspec.Struct, frozen=True, eq=False):
    """The addresses of some layers and heads of a pool, independent of pages. `allocation`, `offset` [plane]."""

    allocation: Offsets
    offset: Offsets
    head_offset: int
    head_bytes: int
    token_bytes: int
    page_bytes: int
    page_tokens: int

    def units(self, held: Held, tokens_at: Offsets, pages: npt.NDArray[np.int64]) -> Offsets:
        """Returns the byte offset of each unit [unit], by its first token. Raises PlanError as `page_ids` does."""
        units = page_ids(held, tokens_at, pages) * self.page_bytes
        if self.head_offset:
            units += self.head_offset
        if self.page_tokens > 1:
            units += tokens_at % self.page_tokens * self.token_bytes
        return units

    def place(self, units: Offsets) -> BoxSide:
        """Returns the side of a box for units at these byte offsets."""
        return BoxSide(self.allocation, self.offset, units, self.head_bytes, self.token_bytes)


@lru_cache(maxsize=1024)
def _pool_cut(spec: PoolSpec, held_layers: Span, held_heads: Span, layers: Span, heads: Span) -> PoolCut:
    """Cached: pools are immutable, and few legs differ in layers and heads."""
    chosen = _plane_table(spec)[[held_layers.index(layer) for layer in layers]].reshape(-1, 2)
    planes = np.ascontiguousarray(chosen.T)
    planes.flags.writeable = False
    head = spec.stride_bytes("head")
    return PoolCut(
        planes[0],
        planes[1],
        held_heads.index(heads.start) * head,
        head * heads.step,
        spec.stride_bytes("token"),
        spec.stride_bytes("page"),
        spec.page_tokens,
    )


@lru_cache(maxsize=256)
def _plane_table(spec: PoolSpec) -> npt.NDArray[np.int64]:
    """Returns `spec.planes()` as [layer, kv, 2]. Cached: for 80 layers it takes longer than all else here."""
    table = np.asarray(spec.planes(), np.int64).reshape(-1, spec.component.kv, 2)
    table.flags.writeable = False
    return table


def packed_place(component: Component, leg: Leg, units: Units, first_byte: int) -> BoxSide:
    """Locate `leg` in a staging buffer: dense, in PACKED_ORDER with units for pages, from `first_byte` on."""
    at_zero = _packed_at_zero(component, leg.layers.count, leg.heads.count, len(units), units.tokens)
    return replace(at_zero, units=at_zero.units + first_byte) if first_byte else at_zero


@lru_cache(maxsize=1024)
def _packed_at_zero(component: Component, layers: int, heads: int, units: int, tokens: int) -> BoxSide:
    """Returns a packed piece at the start of a buffer. Cached: chunks of one size are alike."""
    stride = _packed_strides(component, layers, heads, tokens)
    starts = np.arange(units, dtype=np.int64) * stride["page"]
    starts.flags.writeable = False
    return BoxSide(*_packed_planes(component, layers, tokens), starts, stride["head"], stride["token"])


def _packed_strides(component: Component, layers: int, heads: int, tokens: int) -> dict[str, int]:
    """Returns the stride in bytes of each axis but dim. Pages are outermost, so their number changes no stride."""
    extents = {"page": 1, "head": heads, "layer": layers, "kv": component.kv, "token": tokens}
    layout = Layout.dense(PACKED_ORDER, **extents, dim=component.dim)
    return {axis: layout.stride_of(axis) * component.element_bytes for axis in extents}


@lru_cache(maxsize=1024)
def _packed_planes(component: Component, layers: int, tokens: int) -> tuple[Offsets, Offsets]:
    """Returns allocation and offset of each plane [plane], which depend on neither heads nor units."""
    stride = _packed_strides(component, layers, 1, tokens)
    planes = np.arange(layers, dtype=np.int64)[:, None] * stride["layer"] + np.arange(component.kv) * stride["kv"]
    tables = np.zeros(layers * component.kv, np.int64), planes.reshape(-1)
    for each in tables:
        each.flags.writeable = False
    return tables


def box(component: Component, leg: Leg, units: Units, src: BoxSide, dst: BoxSide) -> Box:
    """Join two places, merging heads into the row where both sides hold them side by side."""
    made = _joined(src, dst, leg.heads.count, units.tokens, component.row_bytes)
    return replace(made, filled=True) if component.window is not None or component.states else made


def _joined(src: BoxSide, dst: BoxSide, heads: int, tokens: int, row_bytes: int) -> Box:
    if src.head_bytes == dst.head_bytes == row_bytes:
        heads, row_bytes = 1, row_bytes * heads
    return Box(src, dst, heads, tokens, row_bytes)


def page_box(src: PoolSpec, src_ids: Ids, dst: PoolSpec, dst_ids: Ids, layers: Span | None = None) -> Box:
    """Make the box of whole pages from pool to pool, equal in layers, heads and tokens a page, their axes in any two
    orders.

    `src_ids`, `dst_ids` [page]: page i of the one goes to page i of the other. `layers`: layers to copy, in the pools'
    own numbers; None: all. Raises PlanError for pools that differ, unequal counts, ids outside a pool, and a
    destination page named twice.
    """
    held, due = (tuple(spec.layout.extent_of(axis) for axis in ("layer", "head", "token")) for spec in (src, dst))
    if held != due or src.component != dst.component:
        raise PlanError(
            f"pages of {src.component.name} with {held} layers, heads and tokens do not go into pages of"
            f" {dst.component.name} with {due}"
        )
    if len(src_ids) != len(dst_ids):
        raise PlanError(f"{len(src_ids)} pages of a pool do not pair with {len(dst_ids)} of another")
    chosen = layers if layers is not None else Span(0, held[0])
    into = _whole_ids(dst_ids)
    ordered = np.sort(into)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PlanError(f"two pages would go into page {int(twice[0])} of {dst.component.name}")
    sides = (_pages_place(src, _whole_ids(src_ids), chosen), _pages_place(dst, into, chosen))
    return _joined(*sides, held[1], held[2], src.component.row_bytes)


def _whole_ids(given: Ids) -> npt.NDArray[np.int64]:
    ids = np.asarray(given)
    if ids.size and ids.dtype.kind not in "iu":
        raise PlanError(f"page ids are whole numbers, got {given!r:.80}")
    return ids.astype(np.int64)


def _pages_place(spec: PoolSpec, ids: npt.NDArray[np.int64], layers: Span) -> BoxSide:
    chosen = _plane_table(spec)[layers.start : layers.stop].reshape(-1, 2)
    return BoxSide(
        np.ascontiguousarray(chosen[:, 0]),
        np.ascontiguousarray(chosen[:, 1]),
        _inside(spec, ids) * spec.stride_bytes("page"),
        spec.stride_bytes("head"),
        spec.stride_bytes("token"),
    )


def nest(b: Box) -> tuple[Dim, Dim, Dim]:
    """Returns the inner loops of a box, merged where both sides allow: its run, runs a stride apart, and the rest."""
    tokens, heads = (b.src.token_bytes, b.dst.token_bytes), (b.src.head_bytes, b.dst.head_bytes)
    return _nest(b.row_bytes, b.tokens, tokens, b.heads, heads)


@lru_cache(maxsize=1024)
def _nest(
    row_bytes: int, tokens: int, token_bytes: tuple[int, int], heads: int, head_bytes: tuple[int, int]
) -> tuple[Dim, Dim, Dim]:
    """Cached: all chunks of a leg have the same."""
    loops = sorted((Dim(tokens, token_bytes), Dim(heads, head_bytes)), key=lambda dim: dim.strides)
    run, *outer = coalesce([Dim(row_bytes, (1, 1)), *loops])
    once = Dim(1, (run.extent, run.extent))
    inner, rest = [*outer, once, once][:2]
    return run, inner, rest


@dataclass(frozen=True, slots=True, eq=False)
class Strided:
    """`count` runs of `run_bytes`, a stride apart, from each pair of addresses: NIXL's strided descriptors.

    `src`, `dst` [n, 2] int64: allocation and byte offset of the first run.
    """

    src: npt.NDArray[np.int64]
    dst: npt.NDArray[np.int64]
    run_bytes: int
    count: int
    src_stride: int
    dst_stride: int

    @property
    def runs(self) -> int:
        """The number of contiguous runs in all rows together."""
        return len(self.src) * self.count


def strided(b: Box) -> Strided:
    """Turn the box into strided descriptors: the loop next to the row becomes the stride, the others are enumerated."""
    run, inner, rest = nest(b)
    src, dst = (_starts(side, rest.extent, stride) for side, stride in zip((b.src, b.dst), rest.strides, strict=True))
    return Strided(src, dst, run.extent, inner.extent, *inner.strides)


def _starts(place: BoxSide, extent: int, stride: int) -> npt.NDArray[np.int64]:
    """Returns (allocation, offset) of plane x unit x `extent` starts `stride` bytes apart, plane-major."""
    inner = (place.units[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    offset = (place.offset[:, None] + inner).reshape(-1)
    return np.stack([np.repeat(place.allocation, len(inner)), offset], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Byte runs, contiguous at both ends and as long as possible. `src`, `dst` [n, 2]: allocation and offset."""

    src: npt.NDArray[np.int64]
    dst: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)


def coalesced_runs(boxes: Sequence[Box]) -> Runs:
    """Returns every byte run of the boxes, neighbours joined: pages that happen to be adjacent cost one run."""
    parts = [_rows(strided(b)) for b in boxes]
    src, dst, nbytes = (np.concatenate(side) for side in zip(*parts, strict=True))
    order = np.lexsort((src[:, 1], src[:, 0]))
    src, dst, nbytes = src[order], dst[order], nbytes[order]
    joined = np.ones(len(nbytes) - 1, bool)
    for side in (src, dst):
        joined &= (side[1:, 0] == side[:-1, 0]) & (side[1:, 1] == side[:-1, 1] + nbytes[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Runs(src[heads], dst[heads], np.add.reduceat(nbytes, heads))


def _rows(s: Strided) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    sides: list[npt.NDArray[np.int64]] = []
    for side, stride in ((s.src, s.src_stride), (s.dst, s.dst_stride)):
        rows = np.repeat(side, s.count, axis=0)
        rows[:, 1] += np.tile(np.arange(s.count, dtype=np.int64) * stride, len(side))
        sides.append(rows)
    return sides[0], sides[1], np.full(s.runs, s.run_bytes, np.int64)


def count_runs(leg: Leg, src: Held, dst: Held, groups: tuple[Units, ...]) -> int:
    """Count the byte runs of a leg, cut into `groups`, whose pages are scattered in both pools: the cost of going
    direct.

    8,192 tokens of 64 layers in NHD, TP4 to TP2: 1,048,576 runs of 512 B a pair. In HND with 64-token pages: 16,384.
    """
    layers, heads = leg.layers, leg.heads  # only counts and steps matter
    return _count_runs(layers.count, layers.step, heads.count, heads.step, groups, src.spec, dst.spec)


@lru_cache(maxsize=1024)
def _count_runs(
    layers: int, layer_step: int, heads: int, head_step: int, groups: tuple[Units, ...], src: PoolSpec, dst: PoolSpec
) -> int:
    """Cached: the legs from all ranks of a fleet to one rank differ only in their heads."""
    spans = Span(0, layers, layer_step), Span(0, heads, head_step)
    per_unit = [_runs_of_unit(*spans, units.tokens, src, dst) for units in groups]
    whole = sum(runs * len(units) for (runs, _), units in zip(per_unit, groups, strict=True))
    if any(_begin_pages(groups, side, spec.page_tokens) for side, spec in (("src", src), ("dst", dst))):
        return whole  # every unit starts a page, so runs of two units cannot join
    at = [np.concatenate([getattr(units, side) for units in groups]) for side in ("src", "dst")]
    order = np.argsort(at[0])
    tokens = np.repeat([units.tokens for units in groups], [len(units) for units in groups])[order]
    runs, continues = (np.repeat(part, [len(units) for units in groups])[order] for part in zip(*per_unit, strict=True))
    joined = continues[1:].astype(bool)
    for side, page_tokens in zip(at, (src.page_tokens, dst.page_tokens), strict=True):
        begins = side[order][1:]
        joined &= (begins == side[order][:-1] + tokens[:-1]) & (begins % page_tokens > 0)
    return int(runs.sum() - runs[1:][joined].sum())


def _begin_pages(groups: tuple[Units, ...], side: str, page_tokens: int) -> bool:
    """Returns True if each unit begins a page of one side, as one does that is as long as the page it lies in."""
    shorter = [getattr(units, side) for units in groups if units.tokens < page_tokens]
    return not any((at % page_tokens).any() for at in shorter)


@lru_cache(maxsize=1024)
def _runs_of_unit(layers: Span, heads: Span, tokens: int, src: PoolSpec, dst: PoolSpec) -> tuple[int, bool]:
    """Returns one unit's runs over all planes, and whether they end with its tokens, so that the next may continue."""
    token, head = (
        Dim(extent, (src.stride_bytes(axis) * step, dst.stride_bytes(axis) * step))
        for axis, extent, step in (("token", tokens, 1), ("head", heads.count, heads.step))
    )
    loops = sorted((token, head, *_plane_loops(layers, src, dst)), key=lambda dim: dim.strides)
    run, *outer = coalesce([Dim(src.component.row_bytes, (1, 1)), *loops])
    return prod(dim.extent for dim in outer), all(stride * tokens == run.extent for stride in token.strides)


def _plane_loops(layers: Span, src: PoolSpec, dst: PoolSpec) -> Iterator[Dim]:
    """Yields layers and kv as loops; separate allocations get strides so far apart that they never merge."""
    for axis, span in (("layer", layers), ("kv", Span(0, src.component.kv))):
        apart = axis in src.separate or axis in dst.separate
        strides = (src.stride_bytes(axis) * span.step, dst.stride_bytes(axis) * span.step)
        yield Dim(span.count, (1 << 62, 1 << 61) if apart else strides)
