"""Copier: runs gathers and scatters on the pools' device and says when each is done, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmover.kernels.region import Region

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.digest_reference import End, Logical

#: Called with the digest of the rows, or None where none was asked for.
Done = Callable[[int | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Regions to copy, or only to read where both their ends are one. `logicals`: where a digest of `end` is wanted."""

    regions: Sequence[Region]
    logicals: Sequence[Logical] | None = None
    end: End = "src"

    @property
    def moves(self) -> bool:
        return any(region.src is not region.dst for region in self.regions)


@dataclass(slots=True)
class Copier:
    """On a GPU: the row mover on a stream of its own, under an SM budget, an event a copy. On a CPU: at once.

    `sms`: multiprocessors that a copy may take (None: no budget). `inline`: whether `run` copies before it returns.
    """

    device: torch.device
    sms: int | None
    inline: bool = field(init=False)
    _stream: torch.cuda.Stream | None = None
    _running: list[tuple[torch.cuda.Event, torch.Tensor | None, Done]] = field(
        default_factory=list["tuple[torch.cuda.Event, torch.Tensor | None, Done]"]
    )

    def __post_init__(self) -> None:
        self.inline = self.device.type == "cpu"

    def run(self, work: Work, done: Done) -> None:
        """Do it and have `poll` call `done` when the bytes are in place. When it raises, nothing of it is under way."""
        if self.inline:
            from kvmover.kernels import digest_reference, reference

            if work.moves:
                reference.move(work.regions)
            done(digest_reference.digest(work.regions, work.logicals, work.end) if work.logicals is not None else None)
            return
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            try:
                total = self._launch(work)
            except Exception:  # a part of it may have been launched, into memory that is free once this is raised
                self._stream.synchronize()
                raise
            event = torch.cuda.Event()
            event.record()
        self._running.append((event, total, done))

    def _launch(self, work: Work) -> torch.Tensor | None:
        """On the current stream: the digest on the host, readable after the event, where one is wanted."""
        import torch

        from kvmover.kernels import digest, rows

        if work.logicals is None:
            rows.move(work.regions, sms=self.sms)
            return None
        total = torch.zeros(1, dtype=torch.int64, device=self.device)
        if work.moves and work.end == "src":
            digest.move_and_digest(work.regions, work.logicals, total, sms=self.sms)
        else:
            if work.moves:
                rows.move(work.regions, sms=self.sms)
            digest.digest(work.regions, work.logicals, work.end, total, sms=self.sms)
        return torch.empty(1, dtype=torch.int64, pin_memory=True).copy_(total, non_blocking=True)

    def poll(self) -> None:
        """Report finished copies, oldest first: they run in order on one stream."""
        while self._running and self._running[0][0].query():
            _, total, done = self._running.pop(0)
            done(None if total is None else int(total[0]) % (1 << 64))

    @property
    def busy(self) -> bool:
        return bool(self._running)
