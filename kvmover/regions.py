"""Regions from plans: boxes with the memory at both ends, pages from pool to pool, and the stream that moves them.

What is computed from integers alone is in `kvmover.plan`, and what touches a byte in `kvmover.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmover.kernels.region import Planes, Region, Side
from kvmover.layout import Pool, Span
from kvmover.plan.lower import Box, BoxSide, Ids, page_box

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.convert_reference import Conversion

#: Moves regions on the current stream, or at once where both ends are on the host: `kernels.bulk.move` and its like.
Move = Callable[[Sequence[Region]], object]


#: Tables of planes of one memory of which what was worked out is kept: a few a component, and one a length of a tail.
MAX_TABLES = 1024


@dataclass(slots=True, eq=False)
class BoundMemory:
    """Flat uint8 tensors [allocation] that boxes lie in, which the caller keeps: pools and arenas, which never move.

    What every copy needs to know of a table of planes, their addresses and the bytes behind them, is worked out for the
    first box that has it. Tables are told apart as objects: those of `plan.lower` are kept and never written.
    """

    tensors: tuple[torch.Tensor, ...]
    _window: tuple[int, int] | None = None
    _tables: dict[tuple[int, int], Planes] = field(default_factory=dict[tuple[int, int], Planes])

    def window(self, first: int, nbytes: int) -> BoundMemory:
        """`nbytes` of the one tensor from `first` on: boxes are counted from there, and end there."""
        return BoundMemory(self.tensors, (first, nbytes), self._tables)

    def side(self, place: BoxSide) -> Side:
        """One side of a box, here."""
        key = id(place.allocation), id(place.offset)  # both live as long as their entry
        planes = self._tables.get(key)
        if planes is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            planes = self._tables[key] = Planes(self.tensors, place.allocation, place.offset)
        if self._window is not None:
            planes = planes.window(*self._window)
        return Side(planes, place.units, place.head_bytes, place.token_bytes)


def bound(box: Box, src: BoundMemory, dst: BoundMemory) -> Region:
    """A box with the memory at both ends. Not one to convert: see `converted`."""
    assert box.recode is None, "rows of another form at the other end are not copied"
    return Region(src.side(box.src), dst.side(box.dst), box.heads, box.tokens, box.row_bytes, box.filled)


def converted(box: Box, src: BoundMemory, dst: BoundMemory) -> Conversion:
    """As `bound`, of a box whose rows have other forms at the two ends."""
    from kvmover.kernels.convert_reference import Conversion

    recode = box.recode
    assert recode is not None, "rows of one form are copied"
    forms = recode.reads, recode.writes, recode.src_scales, recode.dst_scales
    return Conversion(src.side(box.src), dst.side(box.dst), box.heads, box.tokens, *forms)


def page_region(src: Pool, src_ids: Ids, dst: Pool, dst_ids: Ids, layers: Span | None = None) -> Region:
    """Pages `src_ids` [page] of one pool to pages `dst_ids` [page] of another: see `plan.page_box`, which raises."""
    box = page_box(src.spec, src_ids, dst.spec, dst_ids, layers)
    return bound(box, BoundMemory(src.tensors), BoundMemory(dst.tensors))


@dataclass(slots=True)
class CopyStream:
    """Copies of one device in the order they were given: on a GPU on a stream of its own, on a CPU at once.

    Of one thread. The memory of a copy stays allocated until its event has passed.
    """

    device: torch.device
    _stream: torch.cuda.Stream | None = None

    def follow(self, *others: torch.cuda.Stream) -> None:
        """What is launched from now on waits for all that the device's current stream and others were given so far."""
        if self.device.type != "cpu":
            import torch

            for stream in (torch.cuda.current_stream(self.device), *others):
                self._own().wait_stream(stream)

    def launch(self, regions: Sequence[Region], move: Move | None = None) -> torch.cuda.Event | None:
        """Begin a copy; the event that passes when its bytes are in place, or None where they are. Raises RegionError.

        When it raises, nothing of it is under way. `move`: None for `bulk.move`, which chooses by the length of runs.
        """
        if move is None:
            from kvmover.kernels import bulk

            move = bulk.move
        if self.device.type == "cpu":
            move(regions)
            return None
        import torch

        stream = self._own()
        with torch.cuda.stream(stream):
            try:
                move(regions)
            except Exception:  # a part of it may have been launched, into memory that is free once this is raised
                stream.synchronize()
                raise
            event = torch.cuda.Event()
            event.record(stream)
            return event

    def move(self, regions: Sequence[Region]) -> None:
        """Copy, and wait on the host until the bytes are in place. Raises RegionError."""
        event = self.launch(regions)
        if event is not None:
            event.synchronize()

    def _own(self) -> torch.cuda.Stream:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream
