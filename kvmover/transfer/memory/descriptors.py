"""The binding of boxes to memory: regions for kernels, descriptors for the transport, and operations in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvmover.c_core import NATIVE
from kvmover.kernels.region import Region, at_end
from kvmover.layout.layout import Dim
from kvmover.layout.pool import Pool
from kvmover.plan.lower import Box, BoxSide, nest
from kvmover.regions import BoundMemory, bound, converted
from kvmover.transfer.memory.work import Work
from kvmover.transfer.protocol.chunks import Marks
from kvmover.transfer.protocol.handshake import Rank
from kvmover.transport.base import Descriptors, Memory, memory_of

if TYPE_CHECKING:
    from kvmover.kernels.convert_reference import Conversion
    from kvmover.kernels.digest_reference import End, Logical
from dataclasses import field
from typing import Generic, TypeVar

from kvmover.transport.base import Completed, Failed, Transport

T = TypeVar("T")


class Completion(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """The end of an operation: success, or failure for `reason`. `quiescent`: it can't touch memory any more."""

    what: T
    seconds: float
    reason: str | None = None
    quiescent: bool = True


@dataclass(slots=True, eq=False)
class InFlight(Generic[T]):
    """The operations in flight by ticket, each with the caller's object. `unsettled`: those that failed, and may still
    touch memory.
    """

    transport: Transport
    _posted: dict[int, tuple[T, float]] = field(default_factory=dict[int, "tuple[T, float]"])
    unsettled: dict[int, T] = field(default_factory=dict[int, "T"])

    def add(self, ticket: int, what: T, now: float) -> None:
        """Record an operation posted under `ticket` at `now`."""
        self._posted[ticket] = what, now

    def end(self, event: Completed | Failed, now: float) -> Completion[T] | None:
        """Returns the completion of an operation, or None if its ticket is unknown here."""
        found = self._posted.pop(event.ticket, None)
        if found is None:
            return None
        what, since = found
        if isinstance(event, Completed):
            return Completion(what, now - since)
        if not event.quiescent:
            self.unsettled[event.ticket] = what
        return Completion(what, now - since, str(event.error), event.quiescent)

    def settled(self) -> list[T]:
        """Returns operations that failed earlier and can't touch memory any more."""
        still = self.transport.unsettled()
        return [self.unsettled.pop(ticket) for ticket in list(self.unsettled) if ticket not in still]

    def under_way(self) -> list[T]:
        """Returns all operations that may still touch memory."""
        return [*(what for what, _ in self._posted.values()), *self.unsettled.values()]

    def __len__(self) -> int:
        return len(self._posted) + len(self.unsettled)


Numbers = npt.NDArray[np.int64]


def between(
    boxes: Sequence[tuple[int, Box]],
    src: Sequence[BoundMemory],
    dst: Sequence[BoundMemory],
) -> list[Region]:
    """Returns regions of boxes from pool to pool [component]."""
    return [bound(b, src[component], dst[component]) for component, b in boxes]


#: A box with the memory of both ends.
Placed = tuple[Box, BoundMemory, BoundMemory]


def packing(boxes: Sequence[Placed], marks: Sequence[Marks] | None, end: End) -> Work:
    """Returns the copies and conversions of a chunk between staging memory and pools, which are at `end`.

    `marks`: for a digest; None: without. It is over the rows in the pools, or in the chunk if any are converted.
    """
    regions = [bound(*each) for each in boxes if each[0].recode is None]
    if len(regions) == len(boxes):
        return Work(regions, None if marks is None else list(map(logical, marks, regions)), end)
    conversions = [converted(*each) for each in boxes if each[0].recode is not None]
    end = "dst" if end == "src" else "src"
    if marks is None:
        return Work(regions, None, end, conversions)
    of_regions = [mark for mark, (box, *_) in zip(marks, boxes, strict=True) if box.recode is None]
    of_conversions = [mark for mark, (box, *_) in zip(marks, boxes, strict=True) if box.recode is not None]
    logicals = [*map(logical, of_regions, regions), *map(logical, of_conversions, conversions)]
    return Work(regions, logicals, end, conversions)


def logical(marks: Marks, of: Region | Conversion) -> Logical:
    """Returns the coordinates of a region's rows. Heads side by side at both ends are one row."""
    from kvmover.kernels.digest_reference import Logical

    return Logical(marks.planes, marks.positions, marks.heads.start, marks.heads.step, marks.heads.count // of.heads)


def at_rest(work: Work) -> Work:
    """Returns work that only digests the rows at the digested end, without copying."""
    return replace(work, regions=[at_end(region, work.end) for region in work.regions])


def descriptors(boxes: Sequence[tuple[int, Box]], src: Rank, dst: Rank) -> tuple[Descriptors, Descriptors]:
    """Returns the runs of boxes from pool to pool [component] at the source and at the destination, in equal order."""
    nests, counts = list[tuple[Dim, Dim, Dim]](), list[int]()
    for _, b in boxes:
        loops = nest(b)
        nests.append(loops)
        counts.append(b.src.offset.size * b.src.units.size * loops[2].extent)
    tables = np.empty((2, sum(counts), 5), np.int64)
    stop = 0
    for (component, b), (run, inner, rest), count in zip(boxes, nests, counts, strict=True):
        first, stop = stop, stop + count
        describe(
            run.extent,
            inner.extent,
            rest.extent,
            _described(tables[0, first:stop], src, component, b.src, inner.strides[0], rest.strides[0]),
            _described(tables[1, first:stop], dst, component, b.dst, inner.strides[1], rest.strides[1]),
        )
    return Descriptors(src.arena.kind, tables[0]), Descriptors(dst.arena.kind, tables[1])


def _described(rows: Numbers, rank: Rank, component: int, at: BoxSide, stride: int, step: int) -> DescribedSide:
    device = rank.allocations[component][0].device
    return rows, rank.addresses[component], at.allocation, at.offset, at.units, device, stride, step


#: The rows to fill, base addresses [allocation], allocation and offset [plane] and units [unit] of a side; its device,
#: the bytes from a run to the next, and those from a row of a unit to the next.
DescribedSide = tuple[Numbers, Numbers, Numbers, Numbers, Numbers, int, int, int]


def describe_in_python(run_bytes: int, runs: int, places: int, *sides: DescribedSide) -> None:
    """Fill the rows of each side: plane by plane, unit by unit, `places` rows each, of `runs` runs of `run_bytes`."""
    for rows, bases, allocation, offset, units, device, stride, step in sides:
        inside = (units[:, None] + np.arange(places, dtype=np.int64) * step).reshape(-1)
        rows[:, 0] = ((bases[allocation] + offset)[:, None] + inside).reshape(-1)
        rows[:, 1:] = run_bytes, device, stride, runs


#: `describe_in_python`, in C where it was built.
describe: Callable[..., None] = getattr(NATIVE, "descriptors", describe_in_python)


def part(arena: Memory, offset: int, nbytes: int) -> Descriptors:
    """Returns the descriptors of one run of an arena."""
    return Descriptors.run(arena.kind, arena.address + offset, nbytes, arena.device)


def allocations(pool: Pool) -> tuple[Memory, ...]:
    """Returns the memory of each tensor of a pool, in order."""
    return tuple(memory_of(tensor) for tensor in pool.tensors)
