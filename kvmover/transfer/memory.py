"""The mover's memory: its pools and arenas, boxes bound to them for the kernels, and descriptors for the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmover.kernels.region import Region, Side
from kvmover.layout.pool import Pool
from kvmover.plan.lower import Box, Place, strided
from kvmover.transport.base import Descriptors, Memory
from kvmover.transport.memory import memory_of

if TYPE_CHECKING:
    import torch

Bases = npt.NDArray[np.int64]


def region(b: Box, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor]) -> Region:
    """A box with the memory at both ends."""
    return Region(_side(b.src, src), _side(b.dst, dst), b.heads, b.tokens, b.row_bytes)


def _side(place: Place, memory: Sequence[torch.Tensor]) -> Side:
    return Side(tuple(memory), place.allocation, place.offset, place.units, place.head_bytes, place.token_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Base addresses of the two pools that a direct write joins [allocation], and the devices they lie on."""

    local: Bases
    local_device: int
    remote: Bases
    remote_device: int

    @classmethod
    def of(cls, local: Sequence[Memory], remote: Sequence[Memory]) -> Ends:
        return cls(_bases(local), local[0].device, _bases(remote), remote[0].device)


def _bases(memories: Sequence[Memory]) -> Bases:
    return np.array([memory.address for memory in memories], np.int64)


def descriptors(b: Box, ends: Ends) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tables [n, 5] of the local source and the remote destination of a box, row by row alike."""
    s = strided(b)
    sides = (
        (s.src, s.src_stride, ends.local, ends.local_device),
        (s.dst, s.dst_stride, ends.remote, ends.remote_device),
    )
    tables: list[npt.NDArray[np.int64]] = []
    for starts, stride, bases, device in sides:
        table = np.empty((len(starts), 5), np.int64)
        table[:, 0] = bases[starts[:, 0]] + starts[:, 1]
        table[:, 1:] = (s.run_bytes, device, stride if s.count > 1 else s.run_bytes, s.count)
        tables.append(table)
    return tables[0], tables[1]


def join(memory: Memory, tables: Sequence[npt.NDArray[np.int64]]) -> Descriptors:
    return Descriptors(memory.kind, np.concatenate(tables))


def part(arena: Memory, offset: int, nbytes: int) -> Descriptors:
    """One run of an arena."""
    return Descriptors.runs(arena.kind, [arena.address + offset], nbytes, arena.device)


def allocations(pool: Pool) -> tuple[Memory, ...]:
    return tuple(memory_of(tensor) for tensor in pool.tensors)
