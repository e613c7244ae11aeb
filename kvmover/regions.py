"""Regions from plans: boxes with the memory at both ends, pages from pool to pool, and the stream that moves them.

What is computed from integers alone is in `kvmover.plan`, and what touches a byte in `kvmover.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmover.kernels.region import Region, Side
from kvmover.layout import Pool, Span
from kvmover.plan.lower import Box, BoxSide, Ids, page_box

if TYPE_CHECKING:
    import torch

#: Moves regions on the current stream, or at once where both ends are on the host: `kernels.bulk.move` and its like.
Move = Callable[[Sequence[Region]], object]


def bound(box: Box, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor]) -> Region:
    """A box with the memory at both ends: flat uint8 tensors [allocation], which the caller keeps."""
    return Region(_side(box.src, src), _side(box.dst, dst), box.heads, box.tokens, box.row_bytes)


def _side(place: BoxSide, memory: Sequence[torch.Tensor]) -> Side:
    return Side.of(tuple(memory), place.allocation, place.offset, place.units, place.head_bytes, place.token_bytes)


def page_region(src: Pool, src_ids: Ids, dst: Pool, dst_ids: Ids, layers: Span | None = None) -> Region:
    """Pages `src_ids` [page] of one pool to pages `dst_ids` [page] of another: see `plan.page_box`, which raises."""
    return bound(page_box(src.spec, src_ids, dst.spec, dst_ids, layers), src.tensors, dst.tensors)


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
