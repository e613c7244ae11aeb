"""The tables of a request's launches stay on the device: of each kind of chunk one table, of which a chunk is a part.

A chunk of one piece is a first unit and the offset at which it is staged: no upload, one launch. Chunks of several
pieces are launched with a table of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.region import Offsets, Region, Side, check_written_once
from kvmover.transfer.memory.work import Programs, Work, launches
from kvmover.transfer.protocol.chunks import Stretch

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.convert_reference import Conversion
    from kvmover.kernels.digest_reference import End
    from kvmover.kernels.launch import Prepared, Shift


class ChunkCopy(msgspec.Struct, frozen=True, eq=False):
    """The copy of a chunk, or its digest where it lies.

    `work`: returns the work for a chunk that is staged at an offset. `offset`: where it is; 0 if both ends are pools.
    `digests`: the work has logicals. `tables`: of its request and peer. `stretch`: returns the chunk as a part of its
    request's units, or None: it has a table of its own; called where kernels copy. `programs`: see `Work`.
    """

    work: Callable[[int], Work]
    offset: int
    digests: bool
    tables: ChunkTables
    stretch: Callable[[], Stretch | None]
    programs: Programs | None

    def here(self) -> Work:
        """Returns the work of the chunk where it is staged."""
        return self.work(self.offset).using(self.programs)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The launches of one kind of chunks, with the lists and settings for which they were prepared.

    Beside each launch, for its source and destination, the bytes from a packed unit to the next, or None for pools.
    """

    lists: tuple[Offsets | None, Offsets | None]
    settings: tuple[Programs | None, int | None, CopyEngine]
    launches: tuple[tuple[Prepared, int | None, int | None], ...]


@dataclass(slots=True, eq=False)
class ChunkTables:
    """The launches of a request's chunks between two ranks, by kind of chunk. Lists that grew are uploaded anew."""

    _kept: dict[tuple[object, ...], _Kept] = field(default_factory=dict["tuple[object, ...]", _Kept])

    def launches(
        self, chunk: ChunkCopy, stretch: Stretch, sms: int | None, engine: CopyEngine, total: torch.Tensor | None
    ) -> Iterator[tuple[Prepared, Shift]]:
        """Yields the kernel launches of a chunk and its part of each. `total`: see `work.launches`, for the first chunk
        of a kind. Raises RegionError.
        """
        from kvmover.kernels.launch import Prepared, Shift

        kind = *stretch.kind, total is not None
        lists, settings = (stretch.src, stretch.dst), (chunk.programs, sms, engine)
        kept = self._kept.get(kind)
        if kept is None or kept.settings != settings or any(map(_differ, kept.lists, lists)):
            work = over(chunk.work(0).using(chunk.programs), stretch)
            found = [launch for launch in launches(work, sms, total, engine) if isinstance(launch, Prepared)]
            kept = self._kept[kind] = _Kept(lists, settings, tuple(_with_steps(work, stretch, found)))
        for launch, *steps in kept.launches:
            src, dst = (0 if step is None else chunk.offset - stretch.first * step for step in steps)
            yield launch, Shift(stretch.first, src, dst)


def _differ(one: object, other: object) -> bool:
    return one is not other


def over(work: Work, stretch: Stretch) -> Work:
    """Returns the work of a chunk of one piece, whose tables list all units of its stretch.

    Raises RegionError if one of these lies outside its pool, or two units are written to one place.
    """
    lists = [each for each in (stretch.src, stretch.dst) if each is not None]
    count = min(map(len, lists))
    box = _box(work)
    if not work.rests:
        made = replace(box, src=_listing(box.src, stretch.src, count), dst=_listing(box.dst, stretch.dst, count))
        if stretch.src is not None:
            _checked(made, "src")
        if stretch.dst is not None:
            check_written_once([_checked(made, "dst")])
    else:
        side = _listing(box.src, lists[0], count)
        made = replace(box, src=side, dst=side)
        _checked(made, "src")
    marks = work.logicals
    marks = None if marks is None else [replace(each, whole=stretch.positions[:count]) for each in marks]
    if isinstance(made, Region):
        return msgspec.structs.replace(work, regions=[made], logicals=marks)
    return msgspec.structs.replace(work, conversions=[made], logicals=marks)


def _listing(side: Side, units: Offsets | None, count: int) -> Side:
    """Returns a side whose table lists the first `count` of these units; for None, packed ones from 0 on."""
    if units is None:
        return replace(side, whole=np.arange(count, dtype=np.int64) * step_of(side) + side.units[0])
    return replace(side, whole=units[:count])


def _checked(box: Region | Conversion, end: End) -> Region:
    """Returns the region with all listed units of an end in its pool. Raises RegionError if one lies outside of it."""
    region = box if isinstance(box, Region) else box.at(end)
    side = box.src if end == "src" else box.dst
    side = replace(side, units=side.listed, whole=None)
    side.check("source" if end == "src" else "destination", region.reach(side))
    return replace(region, dst=side)


def _box(work: Work) -> Region | Conversion:
    """Returns the region or the conversion of a chunk of one piece."""
    (box,) = (*work.regions, *work.conversions)
    return box


def step_of(side: Side) -> int:
    """Returns the bytes from a unit of packed rows to the next; 0 for one unit."""
    return int(side.units[1] - side.units[0]) if len(side.units) > 1 else 0


def _with_steps(
    work: Work, stretch: Stretch, found: Sequence[Prepared]
) -> Iterator[tuple[Prepared, int | None, int | None]]:
    """Yields each launch with the steps of its ends; after the launch that copies comes one that digests an end."""
    box = _box(work)
    src, dst = (
        None if units is not None or work.rests else step_of(side)
        for side, units in ((box.src, stretch.src), (box.dst, stretch.dst))
    )
    digested = src if work.end == "src" else dst
    for number, launch in enumerate(found):
        yield launch, *((src, dst) if number == 0 else (digested, digested))
