"""The Copier runs gathers and scatters on the pools' device, and reports the end of each without waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvmover.kernels.copy_engine import BY_ROWS, EXPERIMENTAL, CopyEngine
from kvmover.regions import CopyStream
from kvmover.transfer.memory.chunk_tables import ChunkCopy
from kvmover.transfer.memory.work import Work, launches
from kvmover.transfer.protocol.chunks import Stretch

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: Called with the digest of the rows, or None without one.
Done = Callable[[int | None], None]


@dataclass(slots=True)
class Copier:
    """The copies of a mover. On a GPU they run on their own stream, under an SM budget, with an event each; on a CPU at
    once.

    `sms`: most multiprocessors of a copy (None: no limit). `engine`: the copy engine; AUTO: the row mover. `inline`:
    `run` copies before it returns. Raises EngineUnavailable for an engine that the device lacks.
    """

    device: torch.device
    sms: int | None
    engine: CopyEngine = CopyEngine.AUTO
    inline: bool = field(init=False)
    _stream: CopyStream = field(init=False)
    _running: list[tuple[torch.cuda.Event, torch.Tensor | None, Done]] = field(
        default_factory=list["tuple[torch.cuda.Event, torch.Tensor | None, Done]"]
    )

    def __post_init__(self) -> None:
        self.inline = self.device.type == "cpu"
        self._stream = CopyStream(self.device)
        self.configure(self.sms, self.engine)

    def configure(self, sms: int | None, engine: CopyEngine) -> None:
        """Change the settings of later copies. Raises EngineUnavailable, and changes no setting."""
        if engine is not CopyEngine.AUTO:
            from kvmover.kernels import bulk

            bulk.check_engine(engine, self.device)
        if engine in EXPERIMENTAL:
            log.warning("engine = %s is experimental: no GPU has measured it", engine.value)
        self.sms, self.engine = sms, engine

    def run(self, work: Work, done: Done) -> None:
        """Start a copy; `poll` calls `done` once the bytes are in place (inline: `run` does). If it raises, no copy is
        under way.
        """
        if self.inline:
            from kvmover.kernels import cpu

            if work.moves:
                cpu.move(work.regions)
            if work.conversions:
                from kvmover.kernels import convert_reference

                convert_reference.convert(work.conversions)
            done(cpu.digest(work.digested, work.logicals, work.end) if work.logicals is not None else None)
            return
        self._queue(partial(self._launch, work), done)

    def copy(self, chunk: ChunkCopy, done: Done) -> None:
        """Start the copy of a chunk as `run` does. Kernels take the chunk's part of tables that its request shares."""
        stretch = None if self.inline or self.engine not in BY_ROWS else chunk.stretch()
        if stretch is None:
            self.run(chunk.here(), done)
        else:
            self._queue(partial(self._launch_part, chunk, stretch), done)

    def _queue(self, launch: Callable[[], torch.Tensor | None], done: Done) -> None:
        """Launch on the copy stream; `poll` calls `done` with the digest that `launch` returned, or None."""
        totals: list[torch.Tensor | None] = []
        event = self._stream.launch((), lambda _: totals.append(_on_host(launch())))
        assert event is not None, "a copy on a GPU ends at an event"
        self._running.append((event, totals[0], done))

    def _launch(self, work: Work) -> torch.Tensor | None:
        """Launch on the current stream. Returns the digest on the device, or None without one."""
        total = None if work.logicals is None else self._zero()
        for launch in launches(work, self.sms, total, self.engine):
            launch.run()
        return total

    def _launch_part(self, chunk: ChunkCopy, stretch: Stretch) -> torch.Tensor | None:
        """Launch the chunk's part of its tables on the current stream. Returns as `_launch` does."""
        total = self._zero() if chunk.digests else None
        for launch, shift in chunk.tables.launches(chunk, stretch, self.sms, self.engine, total):
            launch.run(shift, *(() if total is None or not launch.outputs else (total,)))
        return total

    def _zero(self) -> torch.Tensor:
        import torch

        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def poll(self) -> None:
        """Report finished copies, oldest first: they run in order on one stream."""
        while self._running and self._running[0][0].query():
            _, total, done = self._running.pop(0)
            done(None if total is None else int(total[0]) % (1 << 64))

    def settle(self) -> None:
        """Wait for all copies, and report them."""
        for event, _, _ in self._running:
            event.synchronize()
        self.poll()

    @property
    def busy(self) -> bool:
        """True if a copy has not passed its event."""
        return bool(self._running)


def _on_host(total: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a digest in host memory, readable after the current stream's next event; None without one."""
    if total is None:
        return None
    import torch

    return torch.empty(1, dtype=torch.int64, pin_memory=True).copy_(total, non_blocking=True)
