"""The chunk plan of a request between two ranks, a Lane: both sides derive the same one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvmover.c_core import NATIVE
from kvmover.errors import PlanError
from kvmover.kernels.region import least_and_most
from kvmover.layout.component import Component
from kvmover.layout.fleet import Fleet
from kvmover.layout.pool import PoolSpec
from kvmover.layout.span import Span
from kvmover.plan.cost import Route
from kvmover.plan.legs import Leg, Plan, Replicas
from kvmover.plan.lower import (
    Box,
    BoxSide,
    Held,
    PoolCut,
    box,
    count_runs,
    packed_place,
    page_ids,
    pool_cut,
    units_of,
)
from kvmover.plan.recode import Forms, Recode, form_text, forms_of, recode_of
from kvmover.plan.units import Units
from kvmover.transfer.protocol.wire import MAX_CHUNKS

#: Alignment of pieces in a chunk, so that each piece can be moved in 16-byte words.
PIECE_ALIGN_BYTES = 16


class End(msgspec.Struct, frozen=True):
    """One side of a lane: a rank of a fleet with its pools, one a component."""

    fleet: Fleet
    rank: int
    pools: tuple[PoolSpec, ...]


class Cut(msgspec.Struct, frozen=True):
    """The cut of a lane: chunks of at most `nbytes`, each within one group of `layers` layers (0: all layers are one
    group), so that a group can go while the next one is computed.
    """

    nbytes: int
    layers: int = 0


class Piece(msgspec.Struct, frozen=True, eq=False):
    """A run of units of one component's leg, or of some of its layers, and its byte offset in the packed chunk.

    `units` are the component's unit group number `group`, from `first_unit` on.
    """

    component: int
    leg: Leg
    units: Units
    first_byte: int
    group: int
    first_unit: int


class ChunkPlan(msgspec.Struct, frozen=True, eq=False):
    """The content of one write. `nbytes` is payload, `span_bytes` its size in an arena, with padding."""

    pieces: tuple[Piece, ...]
    nbytes: int
    span_bytes: int


class Stretch(msgspec.Struct, frozen=True, eq=False):
    """The units of a chunk of one piece, as a part of all units of its group: those from `first` on.

    `kind`: equal for chunks that differ only in `first`. `src`, `dst` [unit]: byte offsets of the group's units in
    pools, as far as their pages are known; None for an end that is packed. `positions` [unit]: of the units' first
    tokens.
    """

    kind: tuple[int, ...]
    first: int
    src: npt.NDArray[np.int64] | None
    dst: npt.NDArray[np.int64] | None
    positions: npt.NDArray[np.int64]


class _Placed(msgspec.Struct, frozen=True, eq=False):
    """The byte offsets in one pool of the first units of each group of a component [group][unit], those with pages in
    `table`.
    """

    table: npt.NDArray[np.int64]
    units: tuple[npt.NDArray[np.int64], ...]


class Lane(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The legs between two ranks, one a component (None: the component sends no tokens), with their units and chunks.

    Chunks are derived when they are first asked for: a lane is often cut anew before. `forms`: the form in which each
    component travels; None: as both sides store it. `layer_bytes` [component]: of a token in one layer, as it travels.

    `nbytes`: payload of all chunks. `direct_runs`: byte runs if every leg went straight from pool to pool, with
    scattered pages. `_cuts`, `_placed`: caches of pool cuts and unit offsets, by side (True: the source) and component.
    `_listed`: of positions, by component and group.
    """

    src: tuple[Held, ...]
    dst: tuple[Held, ...]
    legs: tuple[Leg | None, ...]
    units: tuple[tuple[Units, ...], ...]
    cut: Cut
    forms: tuple[Forms | None, ...]
    layer_bytes: tuple[int, ...]
    nbytes: int
    direct_runs: int
    _cuts: dict[tuple[bool, int, int, int], PoolCut] = msgspec.field(
        default_factory=dict[tuple[bool, int, int, int], PoolCut]
    )
    _placed: dict[tuple[bool, int], _Placed] = msgspec.field(default_factory=dict[tuple[bool, int], _Placed])
    _listed: dict[tuple[int, int], npt.NDArray[np.int64]] = msgspec.field(
        default_factory=dict[tuple[int, int], npt.NDArray[np.int64]]
    )

    @classmethod
    def between(cls, plans: Sequence[Plan | None], src: End, dst: End, cut: Cut) -> Lane:
        """Returns the lane of two ranks. Pure and equal on both sides: page ids are not part of it.

        `plans`: one a component; None: no tokens of it are wanted.
        """
        held_src, held_dst, legs = list[Held](), list[Held](), list[Leg | None]()
        for plan, source, target in zip(plans, src.pools, dst.pools, strict=True):
            if plan:
                shards = plan.src_shard(src.rank), plan.dst_shard(dst.rank)
            else:
                shards = src.fleet.shard(source.component, src.rank, 1), dst.fleet.shard(target.component, dst.rank, 1)
            held_src.append(Held(source, shards[0]))
            held_dst.append(Held(target, shards[1]))
            legs.append(plan.leg(src.rank, dst.rank) if plan else None)
        units, forms, layer_bytes = list[tuple[Units, ...]](), list[Forms | None](), list[int]()
        nbytes = direct_runs = 0
        for leg, s, d in zip(legs, held_src, held_dst, strict=True):
            if leg is None:
                units.append(())
                forms.append(None)
                layer_bytes.append(0)
                continue
            form, groups = forms_of(s, d, leg.layers), units_of(leg, s, d)
            carried = form.wire if form else s.spec.component
            each = carried.kv * leg.heads.count * carried.row_bytes
            units.append(groups)
            forms.append(form)
            layer_bytes.append(each)
            for group in groups:
                nbytes += group.src.size * group.tokens * leg.layers.count * each
            direct_runs += count_runs(leg, s, d, groups)
        held = tuple(held_src), tuple(held_dst), tuple(legs), tuple(units)
        return cls(*held, cut, tuple(forms), tuple(layer_bytes), nbytes, direct_runs)

    def recut(self, cut: Cut) -> Lane:
        """Returns the same lane cut into other chunks, with all that is known of it but its chunks."""
        made = replace(self, cut=cut)
        known = vars(made)
        known.update(vars(self))
        known.pop("chunks", None)
        return made

    @cached_property
    def chunks(self) -> tuple[ChunkPlan, ...]:
        """The chunks, in order. Raises PlanError for more than MAX_CHUNKS, so that a peer can't make this side derive
        more.
        """
        chunks = list[ChunkPlan]()
        for parts in _groups(self.legs, self.cut):
            _fill(chunks, parts, self.layer_bytes, self.units, self.cut.nbytes)
        return tuple(chunks)

    @property
    def converts(self) -> bool:
        """True if a component changes its form on the way. Its bytes differ from both sides' then, so it must be
        packed.
        """
        return any(self.forms)

    def check_route(self, route: Route) -> None:
        """Raise PlanError for the direct and mapped routes, which move bytes as stored, if a component needs
        converting.
        """
        if route is Route.PACKED or not self.converts:
            return
        number = next(number for number, forms in enumerate(self.forms) if forms)
        one, other = self.src[number].spec.component, self.dst[number].spec.component
        raise PlanError(
            f"route = {route.value}, but {one.name} is stored as {form_text(one)} at the source and {form_text(other)}"
            " at the destination: only the packed route converts"
        )

    def gather_boxes(self, chunk: int, pages: Sequence[npt.NDArray[np.int64]]) -> list[tuple[int, Box]]:
        """Returns (component, box) of each piece, from the source's pools to the packed chunk."""
        return [
            (piece.component, self._box(piece, self._source(piece, pages), self._packed(piece), "gathers"))
            for piece in self.chunks[chunk].pieces
        ]

    def scatter_boxes(self, chunk: int, pages: Sequence[npt.NDArray[np.int64]]) -> list[tuple[int, Box]]:
        """Returns (component, box) of each piece, from the packed chunk to the destination's pools."""
        return [
            (piece.component, self._box(piece, self._packed(piece), self._target(piece, pages), "scatters"))
            for piece in self.chunks[chunk].pieces
        ]

    def direct_boxes(
        self, chunk: int, src: Sequence[npt.NDArray[np.int64]], dst: Sequence[npt.NDArray[np.int64]]
    ) -> list[tuple[int, Box]]:
        """Returns (component, box) of each piece, from pool to pool."""
        return [
            (piece.component, self._box(piece, self._source(piece, src), self._target(piece, dst)))
            for piece in self.chunks[chunk].pieces
        ]

    def reach(self, chunk: int, stop: int) -> tuple[int, int]:
        """Returns (layer, position), both exclusive: the chunk can go once all before them is produced. `stop`: the
        request's tokens.
        """
        pieces = self.chunks[chunk].pieces
        return max(p.leg.layers.stop for p in pieces), max(self._stop(p, stop) for p in pieces)

    def source_pages(self, chunk: int) -> tuple[int, ...]:
        """Returns how many leading pages of each of the source's tables a chunk reads from."""
        return self._needed(chunk, self.src)

    def target_needs(self, chunk: int) -> tuple[int, ...]:
        """Returns how many leading pages of each of the destination's tables a chunk writes to."""
        return self._needed(chunk, self.dst)

    def _needed(self, chunk: int, held: Sequence[Held]) -> tuple[int, ...]:
        needed = [0] * len(held)
        for piece in self.chunks[chunk].pieces:
            last = least_and_most(self._at(piece.units, held))[1] // held[piece.component].spec.page_tokens
            needed[piece.component] = max(needed[piece.component], last + 1)
        return tuple(needed)

    def _at(self, units: Units, held: Sequence[Held]) -> npt.NDArray[np.int64]:
        """Returns the index of each unit's first token on the side of `held`."""
        return units.src if held is self.src else units.dst

    @cached_property
    def source_reads(self) -> tuple[int, ...]:
        """The number of leading pages of each of the source's tables that the lane reads from."""
        return self._reads(self.src)

    @cached_property
    def target_reads(self) -> tuple[int, ...]:
        """The number of leading pages of each of the destination's tables that the lane writes to."""
        return self._reads(self.dst)

    def _reads(self, held: Sequence[Held]) -> tuple[int, ...]:
        reads, from_source = list[int](), held is self.src
        for groups, own in zip(self.units, held, strict=True):
            last = -1
            for units in groups:
                last = max(last, least_and_most(units.src if from_source else units.dst)[1])
            reads.append(last // own.spec.page_tokens + 1)
        return tuple(reads)

    @cached_property
    def target_spans(self) -> tuple[range, ...]:
        """The range of entries, from the first to the last that the lane writes, in each of the destination's tables.
        Other lanes may write entries between.
        """
        spans = list[range]()
        for groups, own in zip(self.units, self.dst, strict=True):
            ends, page = list[int](), own.spec.page_tokens
            for units in groups:
                if units.dst.size:
                    ends += least_and_most(units.dst)
            spans.append(range(min(ends) // page, max(ends) // page + 1) if ends else range(0))
        return tuple(spans)

    def source_tokens(self, component: int, first_page: int) -> range:
        """Returns the range from the first to the last token of the lane in the source's pages from `first_page` on."""
        ends = [end for units in self.units[component] for end in (units.src, units.src + units.tokens - 1)]
        at = np.concatenate(ends) if ends else np.zeros(0, np.int64)
        at = at[at // self.src[component].spec.page_tokens >= first_page]
        if not at.size:
            return range(0)
        first, last = (_position(self.src[component], end) for end in least_and_most(at))
        tokens = self.src[component].spec.component.row_tokens
        return range(first * tokens, (last + 1) * tokens)

    def _stop(self, piece: Piece, stop: int) -> int:
        if self.src[piece.component].spec.component.states:
            return stop  # a state is final once all tokens have passed through it
        held = self.src[piece.component]
        last = least_and_most(piece.units.src)[1] + piece.units.tokens - 1  # positions ascend with their index
        return (_position(held, last) + 1) * held.spec.component.row_tokens

    def _positions(self, piece: Piece) -> npt.NDArray[np.int64]:
        """Returns the logical position of each unit's first token [unit] in a piece's group, equal from both sides."""
        key = piece.component, piece.group
        listed = self._listed.get(key)
        if listed is None:
            units = self.units[piece.component][piece.group]
            listed = self._listed[key] = _position(self.src[piece.component], units.src)
        return listed

    def stretch(
        self,
        chunk: int,
        src: Sequence[npt.NDArray[np.int64]] | None,
        dst: Sequence[npt.NDArray[np.int64]] | None,
    ) -> Stretch | None:
        """Returns a chunk as a part of its group's units; None for several pieces, or unless the page tables were
        checked as far as the chunk goes. `src`, `dst`: page tables of the ends in pools.
        """
        piece, *others = self.chunks[chunk].pieces
        if others:
            return None
        ends = [
            None if pages is None else self._known(piece, held, pages[piece.component])
            for held, pages in ((self.src, src), (self.dst, dst))
        ]
        if [end is None for end in ends] != [src is None, dst is None]:
            return None
        layers = piece.leg.layers
        kind = piece.component, layers.start, layers.count, piece.group, piece.units.src.size
        return Stretch(kind, piece.first_unit, ends[0], ends[1], self._positions(piece))

    def _known(self, piece: Piece, held: Sequence[Held], table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Returns the cached offsets of a group's units if they cover a piece of it, or None."""
        placed = self._placed.get((held is self.src, piece.component))
        if placed is None or placed.table is not table:
            return None
        units = placed.units[piece.group]
        return units if piece.first_unit + piece.units.src.size <= units.size else None

    def marks(self, chunk: int) -> list[Marks]:
        """Returns the logical coordinates of a chunk's pieces, in the order of its boxes: its digest is computed over
        them.
        """
        return [self._marks(piece) for piece in self.chunks[chunk].pieces]

    def _marks(self, piece: Piece) -> Marks:
        kv = self.src[piece.component].spec.component.kv
        planes = [layer * kv + i for layer in piece.leg.layers for i in range(kv)]
        number = np.array(planes, np.int64) + (piece.component << 40)  # plane numbers of components differ
        positions = self._positions(piece)[piece.first_unit : piece.first_unit + piece.units.src.size]
        return Marks(number, positions, piece.leg.heads)

    def check_pages(self, held: Sequence[Held], pages: Sequence[npt.NDArray[np.int64]]) -> None:
        """Check the page tables of the side of `held`, and cache their unit offsets. Raises PlanError if they don't
        cover the lane.
        """
        if len(pages) != len(held):
            raise PlanError(f"{len(pages)} page tables for {len(held)} components")
        for component, table in enumerate(pages):
            self._place(held, component, table, [units.src.size for units in self.units[component]])

    def _place(self, held: Sequence[Held], component: int, table: npt.NDArray[np.int64], counts: Sequence[int]) -> None:
        """Cache the offsets of the first units of each group, `counts` of them, by a page table. Raises PlanError as
        `page_ids` does.
        """
        leg = self.legs[component]
        if leg is not None:
            cut, own, groups = self._cut(held, component, leg), held[component], self.units[component]
            every = [
                unit_offsets(cut, own, self._at(units, held)[:count], table)
                for units, count in zip(groups, counts, strict=True)
            ]
            self._placed[held is self.src, component] = _Placed(table, tuple(every))

    def _place_named(self, held: Sequence[Held], component: int, table: npt.NDArray[np.int64]) -> None:
        """Cache the offsets of the units before the first one whose page a table does not name yet."""
        stop, counts = len(table) * held[component].spec.page_tokens, list[int]()
        for units in self.units[component]:
            named = self._at(units, held) < stop
            counts.append(named.size if named.all() else int(named.argmin()))
        self._place(held, component, table, counts)

    def _cut(self, held: Sequence[Held], component: int, leg: Leg) -> PoolCut:
        """Returns the cut of a leg's layers and heads in the pool of one side. All legs of a component here have the
        same heads.
        """
        key = held is self.src, component, leg.layers.start, leg.layers.count
        cut = self._cuts.get(key)
        if cut is None:
            cut = self._cuts[key] = pool_cut(held[component], leg)
        return cut

    def check_named(self, held: Sequence[Held], pages: Sequence[npt.NDArray[np.int64]]) -> None:
        """Check page tables that are named part by part, as far as they go; whole ones as `check_pages` does. Raises
        PlanError for a page outside its pool.
        """
        if len(pages) != len(held):
            raise PlanError(f"{len(pages)} page tables for {len(held)} components")
        reads = self.source_reads if held is self.src else self.target_reads
        if _covered(reads, pages):
            self.check_pages(held, pages)
            return
        for component, (groups, own, table) in enumerate(zip(self.units, held, pages, strict=True)):
            for units in groups:
                at = self._at(units, held)
                page_ids(own, at[at < len(table) * own.spec.page_tokens], table)
            self._place_named(held, component, table)

    def check_chunk(self, chunk: int, pages: Sequence[npt.NDArray[np.int64]]) -> None:
        """Check the source's page tables for one chunk of a request whose pages are named as they are computed: for all
        chunks, and once, if the tables cover them. Raises PlanError if they don't cover the chunk.
        """
        if len(pages) == len(self.src) and _covered(self.source_reads, pages):
            self._check_whole(pages)
            return
        for piece in self.chunks[chunk].pieces:
            placed, table = self._placed.get((True, piece.component)), pages[piece.component]
            if placed is None or placed.table is not table:
                self._place_named(self.src, piece.component, table)
            self._source(piece, pages)

    def _check_whole(self, pages: Sequence[npt.NDArray[np.int64]]) -> None:
        """Check the source's page tables, which cover the lane, unless they were the last ones checked."""
        for component, table in enumerate(pages):
            placed = self._placed.get((True, component))
            if self.legs[component] is not None and (placed is None or placed.table is not table):
                self.check_pages(self.src, pages)
                return

    def target_pages(self, chunk: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yields (component, indices into the destination's page table) for each piece of a chunk."""
        for piece in self.chunks[chunk].pieces:
            yield piece.component, np.unique(piece.units.dst // self.dst[piece.component].spec.page_tokens)

    def _box(self, piece: Piece, src: BoxSide, dst: BoxSide, verb: Literal["gathers", "scatters"] | None = None) -> Box:
        number, forms = piece.component, self.forms[piece.component]
        if forms is None:
            return box(self.src[number].spec.component, piece.leg, piece.units, src, dst)
        if verb is not None and getattr(forms, verb):
            return recoded_box(src, dst, piece, recode_of(self.src[number], self.dst[number], piece.leg.layers))
        return box(forms.wire, piece.leg, piece.units, src, dst)

    def _packed(self, piece: Piece) -> BoxSide:
        forms = self.forms[piece.component]
        component = forms.wire if forms else self.src[piece.component].spec.component
        return packed_place(component, piece.leg, piece.units, piece.first_byte)

    def _source(self, piece: Piece, pages: Sequence[npt.NDArray[np.int64]]) -> BoxSide:
        return self._in_pool(piece, self.src, pages[piece.component])

    def _target(self, piece: Piece, pages: Sequence[npt.NDArray[np.int64]]) -> BoxSide:
        return self._in_pool(piece, self.dst, pages[piece.component])

    def _in_pool(self, piece: Piece, held: Sequence[Held], table: npt.NDArray[np.int64]) -> BoxSide:
        """Returns the side of a box for a piece in the pool of `held`: from the cache if `table` was checked whole."""
        cut, units = self._cut(held, piece.component, piece.leg), self._known(piece, held, table)
        if units is None:
            units = unit_offsets(cut, held[piece.component], self._at(piece.units, held), table)
        else:
            units = units[piece.first_unit : piece.first_unit + piece.units.src.size]
        return BoxSide(cut.allocation, cut.offset, units, cut.head_bytes, cut.token_bytes)


#: An index into the positions of a rank, or many [n].
At = TypeVar("At", int, npt.NDArray[np.int64])


def _position(held: Held, tokens_at: At) -> At:
    """Returns the logical position of a rank's token, or of each."""
    positions = held.shard.positions
    assert positions is not None, "a piece was cut from positions that nobody holds"
    return tokens_at // positions.width * positions.step + tokens_at % positions.width + positions.start


def unit_offsets(
    cut: PoolCut, held: Held, tokens_at: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Returns what `PoolCut.units` does, in C where it was built. Raises PlanError as `page_ids` does."""
    if NATIVE is not None:
        found, table = np.empty(len(tokens_at), np.int64), np.ascontiguousarray(pages, np.int64)
        each = cut.page_bytes, cut.token_bytes, cut.head_offset
        if NATIVE.unit_offsets(found, tokens_at, table, cut.page_tokens, held.spec.pages, *each):
            return found
    return cut.units(held, tokens_at, pages)


class Marks(msgspec.Struct, frozen=True, eq=False):
    """The logical coordinates of one piece's rows: `planes` [layer x kv], and `positions` [unit] of each unit's first
    token.
    """

    planes: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    heads: Span


@lru_cache(maxsize=256)
def plans_between(
    components: tuple[Component, ...], src: Fleet, dst: Fleet, positions: range, replicas: Replicas
) -> tuple[Plan | None, ...]:
    """Returns one plan a component for tokens `positions` of a request; None if they need no rows of it. Cached: every
    rank of a fleet asks for the same.
    """
    wanted = [component.wanted(positions) for component in components]
    return tuple(
        Plan(component, src, dst, own.start, own.stop, replicas) if own else None
        for component, own in zip(components, wanted, strict=True)
    )


@lru_cache(maxsize=1024)
def related(components: tuple[Component, ...], src: Fleet, dst: Fleet, replicas: Replicas) -> Relation:
    """Returns the pairs of ranks that may serve each other for some request. Cached: each request asks."""
    tokens = max(component.row_tokens for component in components)
    plans = plans_between(components, src, dst, range(tokens), replicas)
    return Relation(tuple(plan for plan in plans if plan))


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """The pairs of source and destination ranks of two fleets that may exchange bytes for some request. Cached by rank:
    each request asks.
    """

    plans: tuple[Plan, ...]
    _sources: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]], init=False)
    _destinations: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]], init=False)

    def sources_of(self, dst_rank: int) -> frozenset[int]:
        """Returns the source ranks that may send to a destination rank."""
        if dst_rank not in self._sources:
            every = (rank for plan in self.plans for rank in plan.sources_of(dst_rank))
            self._sources[dst_rank] = frozenset(every)
        return self._sources[dst_rank]

    def destinations_of(self, src_rank: int) -> frozenset[int]:
        """Returns the destination ranks to which a source rank may send."""
        if src_rank not in self._destinations:
            every = (rank for plan in self.plans for rank in plan.destinations_of(src_rank))
            self._destinations[src_rank] = frozenset(every)
        return self._destinations[src_rank]


def recoded_box(src: BoxSide, dst: BoxSide, piece: Piece, recode: Recode) -> Box:
    """Returns a box over rows stored in different forms at the two ends. Rows of different heads stay apart."""
    return Box(src, dst, piece.leg.heads.count, piece.units.tokens, recode.reads.row_bytes, recode)


def _covered(reads: Sequence[int], pages: Sequence[npt.NDArray[np.int64]]) -> bool:
    """Returns True if each page table has the entries that are read of it."""
    return not [most for most, table in zip(reads, pages, strict=True) if len(table) < most]


def _groups(legs: Sequence[Leg | None], cut: Cut) -> list[list[tuple[int, Leg]]]:
    """Returns the component and the leg, or its part, of each component in each group of layers."""
    whole = [(number, leg) for number, leg in enumerate(legs) if leg]
    if not cut.layers:
        return [whole]
    numbers = sorted({layer // cut.layers for _, leg in whole for layer in leg.layers})
    spans = [Span(number * cut.layers, cut.layers) for number in numbers]
    return [
        [(number, replace(leg, layers=layers)) for number, leg in whole if (layers := leg.layers & span)]
        for span in spans
    ]


def _fill(
    chunks: list[ChunkPlan],
    parts: Sequence[tuple[int, Leg]],
    layer_bytes: Sequence[int],
    units: Sequence[tuple[Units, ...]],
    chunk_bytes: int,
) -> None:
    """Append the chunks of a group of layers, filled unit by unit up to `chunk_bytes`. A larger unit gets its own."""
    pieces: list[Piece] = []
    used = payload = 0
    for number, leg in parts:
        token_bytes = leg.layers.count * layer_bytes[number]
        for group, whole in enumerate(units[number]):
            unit_bytes, count = whole.tokens * token_bytes, whole.src.size
            done = 0
            while done < count:
                used = -(-used // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES
                take = min((chunk_bytes - used) // unit_bytes, count - done)
                if take < 1 and pieces:
                    _append(chunks, ChunkPlan(tuple(pieces), payload, used), chunk_bytes)
                    pieces, used, payload = [], 0, 0
                    continue
                take = max(take, 1)
                part = whole if take == count else whole.slice(done, done + take)
                pieces.append(Piece(number, leg, part, used, group, done))
                used, payload, done = used + take * unit_bytes, payload + take * unit_bytes, done + take
    if pieces:
        _append(chunks, ChunkPlan(tuple(pieces), payload, used), chunk_bytes)


def _append(chunks: list[ChunkPlan], chunk: ChunkPlan, chunk_bytes: int) -> None:
    if len(chunks) == MAX_CHUNKS:
        raise PlanError(f"more than {MAX_CHUNKS} chunks of {chunk_bytes} bytes between two ranks; make them larger")
    chunks.append(chunk)
