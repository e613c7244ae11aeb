"""A SlabProver compares all that sealed slabs have with its digests, in a thread of its own.

What the kernel has sealed nobody changes any more, so that it is looked at once, here, and not by all who read it.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue
from socket import socketpair
from threading import Thread

from kvmover.store.keeper import memory
from kvmover.store.keeper.journal import page_and_digests
from kvmover.store.keeper.state import SlabProved
from kvmover.store.record import DIGEST_BYTES, RecordTable, holds

#: What is read and compared at a time, in whole cells.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class SealedSlab:
    """A slab to look at: descriptors of its memory and of the journal, which are given up, and where what is in it is.

    `base`: the place of the journal's first byte.
    """

    number: int
    fd: int
    nbytes: int
    journal: int
    base: int
    objects: RecordTable

    def bad(self) -> frozenset[int]:
        """Offsets of the objects that are not what their digests say. Raises OSError."""
        found, of = set[int](), self.objects
        buffer = bytearray(_CHUNK_BYTES)
        for at, offset, nbytes in zip(of.at.tolist(), of.offset.tolist(), of.nbytes.tolist(), strict=True):
            _, digests = page_and_digests(self._read, at)
            cells = len(digests) // DIGEST_BYTES
            size = nbytes // cells
            if size > len(buffer):
                buffer = bytearray(size)
            step = len(buffer) // size
            for first in range(0, cells, step):
                count = min(step, cells - first)
                view = memoryview(buffer)[: count * size]
                if os.preadv(self.fd, [view], offset + first * size) < len(view) or not holds(
                    view, count, digests, first
                ):
                    found.add(offset)
        return frozenset(found)

    def _read(self, place: int, nbytes: int) -> bytes:
        return os.pread(self.journal, nbytes, place - self.base)

    def close(self) -> None:
        """Give up the descriptors."""
        os.close(self.fd)
        os.close(self.journal)


class SlabProver:
    """Takes slabs, and has an event for each that was proved; `wake_fd` can be read where there is one."""

    def __init__(self) -> None:
        self._slabs = Queue[SealedSlab | None]()
        self._proved = deque[SlabProved]()
        self._near, self._far = socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._thread = Thread(target=self._work, daemon=True, name="kvmover-prover")
        self._thread.start()

    @property
    def wake_fd(self) -> int:
        """Has something to read where `take` has something, or `wake` was called."""
        return self._near.fileno()

    def prove(self, slab: SealedSlab) -> None:
        """One after the other."""
        self._slabs.put(slab)

    def wake(self) -> None:
        """Let `wake_fd` be read."""
        with suppress(OSError):
            self._far.send(b".")

    def take(self) -> list[SlabProved]:
        """What was proved since the last time."""
        with suppress(BlockingIOError):
            self._near.recv(4096)
        return [self._proved.popleft() for _ in range(len(self._proved))]

    def _work(self) -> None:
        while (slab := self._slabs.get()) is not None:
            try:
                memory.collapse(slab.fd, slab.nbytes)
                if memory.is_sealed(slab.fd):
                    self._proved.append(SlabProved(slab.number, slab.bad()))
                    self.wake()
            except OSError:  # it was evicted meanwhile
                pass
            finally:
                slab.close()

    def close(self) -> None:
        """End, once what was begun is done."""
        self._slabs.put(None)
        self._thread.join()
        self._near.close()
        self._far.close()
