"""Slabs: how an arena is divided into registrations, and which of them can be registered anew. Integers only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvmover.transfer.memory.arena import ALIGN_BYTES, Arena, region_bytes
from kvmover.transport.base import Revocation

#: More slabs free less at a time, and each is one registration more in everybody's metadata.
MAX_SLABS = 8


def slab_bytes(arena_bytes: int, chunk_bytes: int, revocation: Revocation) -> int:
    """Bytes of each slab: an eighth of the arena, but no less than a chunk; all of it where no slab is ever renewed.

    64 MiB with chunks of 8 MiB are 8 slabs of 8 MiB; with chunks of 32 MiB, 2 of 32 MiB.
    """
    count = min(MAX_SLABS, arena_bytes // region_bytes(chunk_bytes))
    if revocation is Revocation.UNPROVEN or count <= 1:
        return arena_bytes
    return arena_bytes // count // ALIGN_BYTES * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Renewal:
    """What to do with an arena of which peers that are lost may write some regions.

    `now`: slabs that nobody else has a region of: deregistered and registered anew, they are free. `next`: the slab
    that gets there soonest if nobody is given more of it; None where none waits, or where there is no other slab.
    """

    now: tuple[int, ...] = ()
    next: int | None = None


def renewal(arena: Arena, lost: Collection[int]) -> Renewal:
    """`lost`: offsets of quarantined regions whose writers are lost. O(leased regions)."""
    healthy = dict.fromkeys(map(arena.slab_of, lost), 0)
    for offset, nbytes in arena.leased():
        slab = arena.slab_of(offset)
        if slab in healthy and offset not in lost:
            healthy[slab] += nbytes
    now = tuple(sorted(slab for slab, nbytes in healthy.items() if not nbytes))
    waiting = [slab for slab in sorted(healthy) if healthy[slab] and arena.slabs > 1]
    return Renewal(now, min(waiting, key=healthy.__getitem__, default=None))
