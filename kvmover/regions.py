"""Regions are made of plans here: boxes with the memory at both ends, and the stream that moves them."""

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


#: Most tables of planes cached for one memory: a few for each component, and one for each length of a tail.
MAX_TABLES = 1024


@dataclass(slots=True, eq=False)
class BoundMemory:
    """Flat uint8 tensors [allocation] that boxes lie in, kept alive by the caller, never moved.

    Addresses are cached by a box's tables of planes, which are never written.
    """

    tensors: tuple[torch.Tensor, ...]
    _window: tuple[int, int] | None = None
    _tables: dict[tuple[int, int], Planes] = field(default_factory=dict[tuple[int, int], Planes])

    def window(self, first: int, nbytes: int) -> BoundMemory:
        """Returns `nbytes` of the single tensor from `first` on; boxes are relative to it."""
        return BoundMemory(self.tensors, (first, nbytes), self._tables)

    def side(self, place: BoxSide) -> Side:
        """Returns one side of a box here."""
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
    """Returns a box with memory at both ends. Its rows must have one form."""
    assert box.recode is None, "rows of another form at the other end are not copied"
    return Region(src.side(box.src), dst.side(box.dst), box.heads, box.tokens, box.row_bytes, box.filled)


def converted(box: Box, src: BoundMemory, dst: BoundMemory) -> Conversion:
    """Returns a box, whose rows differ in form, with memory at both ends."""
    from kvmover.kernels.convert_reference import Conversion

    recode = box.recode
    assert recode is not None, "rows of one form are copied"
    forms = recode.reads, recode.writes, recode.src_scales, recode.dst_scales
    return Conversion(src.side(box.src), dst.side(box.dst), box.heads, box.tokens, *forms)


def page_region(src: Pool, src_ids: Ids, dst: Pool, dst_ids: Ids, layers: Span | None = None) -> Region:
    """Returns the move of pages `src_ids` [page] to another pool's `dst_ids` [page]. Raises as `plan.page_box`."""
    box = page_box(src.spec, src_ids, dst.spec, dst_ids, layers)
    return bound(box, BoundMemory(src.tensors), BoundMemory(dst.tensors))


@dataclass(slots=True)
class CopyStream:
    """Copies of one device in order: on a GPU on a stream of its own, on a CPU at once.

    One thread uses it. Keep a copy's memory until its event has passed.
    """

    device: torch.device
    _stream: torch.cuda.Stream | None = None

    def follow(self, *others: torch.cuda.Stream) -> None:
        """Make later launches wait for the current stream's and `others`' work so far."""
        if self.device.type != "cpu":
            import torch

            for stream in (torch.cuda.current_stream(self.device), *others):
                self._own().wait_stream(stream)

    def launch(self, regions: Sequence[Region], move: Move | None = None) -> torch.cuda.Event | None:
        """Begin a copy. Returns the event that passes when its bytes are in place, or None if they are. Raises
        RegionError.

        After an error no part of it is under way.
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
        """Copy, and wait until the bytes are in place. Raises RegionError."""
        event = self.launch(regions)
        if event is not None:
            event.synchronize()

    def _own(self) -> torch.cuda.Stream:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream
