"""Lane: all that goes from one rank to one rank for a request, cut into chunks that both sides derive alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmover.layout.fleet import Fleet
from kvmover.layout.pool import PoolSpec
from kvmover.plan.legs import Leg, Plan, Replicas
from kvmover.plan.lower import Box, Held, Place, box, count_runs, packed_place, pool_place, units_of
from kvmover.plan.units import Units

#: Pieces of a chunk start at multiples of this, so that every piece can be moved in 16-byte words.
PIECE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class End:
    """One side of a lane: a rank of a fleet with its pools, one a component."""

    fleet: Fleet
    rank: int
    pools: tuple[PoolSpec, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some units of one component's leg, and where they start in the packed chunk."""

    component: int
    units: Units
    first_byte: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """What one write carries. `nbytes` is payload, `span_bytes` what it takes in an arena."""

    pieces: tuple[Piece, ...]
    nbytes: int
    span_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The legs between two ranks, one a component (None: nothing of it), and their chunks."""

    src: tuple[Held, ...]
    dst: tuple[Held, ...]
    legs: tuple[Leg | None, ...]
    chunks: tuple[ChunkPlan, ...]

    @classmethod
    def between(cls, plans: Sequence[Plan], src: End, dst: End, chunk_bytes: int) -> Lane:
        """Pure and the same on both sides: page ids stay out of it."""
        held_src = tuple(Held(s, p.src_shard(src.rank)) for p, s in zip(plans, src.pools, strict=True))
        held_dst = tuple(Held(s, p.dst_shard(dst.rank)) for p, s in zip(plans, dst.pools, strict=True))
        legs = tuple(plan.leg(src.rank, dst.rank) for plan in plans)
        return cls(held_src, held_dst, legs, tuple(_chunks(plans, legs, held_src, held_dst, chunk_bytes)))

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    def direct_runs(self) -> int:
        """Byte runs if every leg went straight from pool to pool, pages scattered."""
        return sum(
            count_runs(leg, src, dst) for leg, src, dst in zip(self.legs, self.src, self.dst, strict=True) if leg
        )

    def gather_boxes(self, chunk: int, pages: Sequence[npt.NDArray[np.int64]]) -> list[tuple[int, Box]]:
        """(component, box) from the source's pools to the packed chunk."""
        return [
            (piece.component, self._box(piece, self._source(piece, pages), self._packed(piece)))
            for piece in self.chunks[chunk].pieces
        ]

    def scatter_boxes(self, chunk: int, pages: Sequence[npt.NDArray[np.int64]]) -> list[tuple[int, Box]]:
        """(component, box) from the packed chunk to the destination's pools."""
        return [
            (piece.component, self._box(piece, self._packed(piece), self._target(piece, pages)))
            for piece in self.chunks[chunk].pieces
        ]

    def direct_boxes(
        self, chunk: int, src: Sequence[npt.NDArray[np.int64]], dst: Sequence[npt.NDArray[np.int64]]
    ) -> list[tuple[int, Box]]:
        """(component, box) from pool to pool."""
        return [
            (piece.component, self._box(piece, self._source(piece, src), self._target(piece, dst)))
            for piece in self.chunks[chunk].pieces
        ]

    def _leg(self, piece: Piece) -> Leg:
        leg = self.legs[piece.component]
        assert leg is not None, "a piece was cut from a leg that does not exist"
        return leg

    def _box(self, piece: Piece, src: Place, dst: Place) -> Box:
        component = self.src[piece.component].spec.component
        return box(component, self._leg(piece), piece.units, src, dst)

    def _packed(self, piece: Piece) -> Place:
        component = self.src[piece.component].spec.component
        return packed_place(component, self._leg(piece), piece.units, piece.first_byte)

    def _source(self, piece: Piece, pages: Sequence[npt.NDArray[np.int64]]) -> Place:
        return pool_place(self.src[piece.component], self._leg(piece), piece.units.src, pages[piece.component])

    def _target(self, piece: Piece, pages: Sequence[npt.NDArray[np.int64]]) -> Place:
        return pool_place(self.dst[piece.component], self._leg(piece), piece.units.dst, pages[piece.component])


def plans_between(
    pools: Sequence[PoolSpec], src: Fleet, dst: Fleet, positions: range, replicas: Replicas
) -> tuple[Plan, ...]:
    """One plan a component for the positions of a request; none for an empty range."""
    return tuple(Plan(p.component, src, dst, positions.start, positions.stop, replicas) for p in pools)


def _chunks(
    plans: Sequence[Plan],
    legs: Sequence[Leg | None],
    src: Sequence[Held],
    dst: Sequence[Held],
    chunk_bytes: int,
) -> list[ChunkPlan]:
    """Fill chunks unit by unit, in order; a unit larger than a chunk has one of its own."""
    chunks: list[ChunkPlan] = []
    pieces: list[Piece] = []
    used = payload = 0
    for number, (plan, leg) in enumerate(zip(plans, legs, strict=True)):
        if leg is None:
            continue
        token_bytes = leg.layers.count * plan.component.kv * leg.heads.count * plan.component.row_bytes
        for units in units_of(leg, src[number], dst[number]):
            unit_bytes = units.tokens * token_bytes
            done = 0
            while done < len(units):
                used = -(-used // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES
                take = min((chunk_bytes - used) // unit_bytes, len(units) - done)
                if take < 1 and pieces:
                    chunks.append(ChunkPlan(tuple(pieces), payload, used))
                    pieces, used, payload = [], 0, 0
                    continue
                take = max(take, 1)
                pieces.append(Piece(number, units.slice(done, done + take), used))
                used, payload, done = used + take * unit_bytes, payload + take * unit_bytes, done + take
    return [*chunks, ChunkPlan(tuple(pieces), payload, used)] if pieces else chunks
