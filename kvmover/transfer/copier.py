"""Copier: runs gathers and scatters on the pools' device and says when each is done, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmover.kernels.region import Region

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Copier:
    """On a GPU: the row mover on a stream of its own, under an SM budget, an event a copy. On a CPU: at once.

    `sms`: multiprocessors that a copy may take (None: no budget).
    """

    device: torch.device
    sms: int | None
    _stream: torch.cuda.Stream | None = None
    _running: list[tuple[torch.cuda.Event, Callable[[], None]]] = field(
        default_factory=list["tuple[torch.cuda.Event, Callable[[], None]]"]
    )

    def copy(self, regions: Sequence[Region], done: Callable[[], None], after: torch.cuda.Event | None = None) -> None:
        """Copy `regions` and have `poll` call `done` when the bytes are in place; not before `after` has passed."""
        if self.device.type == "cpu":
            from kvmover.kernels import reference

            reference.move(regions)
            done()
            return
        import torch

        from kvmover.kernels import rows

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            rows.move(regions, sms=self.sms)
            event = torch.cuda.Event()
            event.record()
        self._running.append((event, done))

    def poll(self) -> None:
        """Report finished copies, oldest first: they run in order on one stream."""
        while self._running and self._running[0][0].query():
            self._running.pop(0)[1]()

    @property
    def busy(self) -> bool:
        return bool(self._running)
