"""A load of puts, gets, evictions and clears that kills itself at a chosen system call, half way through it.

It runs in a fork of a process that has everything imported, and tells through a pipe what the store has promised.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from store_rank import GQA, MLA, PAGE, SPACE, Rank, pages_of

from kvmover.layout import Component
from kvmover.store import PagePart, PageStore, Policy
from kvmover.store.files import FileRun, PlainFiles
from kvmover.store.record import tables
from kvmover.store.segment import Segment
from kvmover.store.segment_objects import SegmentObjects, _Written

PAGES = 24
POLICY = Policy(segment_bytes=96 << 10)
COMPONENTS: tuple[Component, ...] = (GQA, MLA)


class Killer:
    """Counts the calls that change files, and makes one of them the last: before it, after it, or torn."""

    def __init__(self, chance: random.Random, after: int) -> None:
        self.left, self.chance = after, chance

    def wrap(self, call: Callable[..., int], torn: Callable[..., object] | None) -> Callable[..., int]:
        def counted(*arguments: object, **options: object) -> int:
            self.left -= 1
            if self.left >= 0:
                return call(*arguments, **options)
            how = self.chance.choice(("before", "torn", "after"))
            if how == "torn" and torn:
                torn(self.chance, *arguments)
            elif how == "after":
                call(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("unreachable")

        return counted


def arm(chance: random.Random, after: int) -> None:
    """Every call by which the store changes its files, in this process and for ever."""
    killer = Killer(chance, after)
    pwrite, pwritev = os.pwrite, os.pwritev

    def torn_pwrite(chance: random.Random, fd: int, data: bytes, offset: int) -> None:
        pwrite(fd, data[: chance.randrange(len(data) + 1)], offset)

    def torn_pwritev(chance: random.Random, fd: int, views: list[memoryview], offset: int) -> None:
        data = b"".join(views)
        pwrite(fd, data[: chance.randrange(len(data) + 1)], offset)

    os.pwrite = killer.wrap(pwrite, torn_pwrite)
    os.pwritev = killer.wrap(pwritev, torn_pwritev)
    for name in ("write", "fdatasync", "ftruncate", "unlink", "open", "replace"):
        setattr(os, name, killer.wrap(getattr(os, name), None))


def run(root: Path, seed: int, promise: int) -> None:
    """Work until the kill. Each line to `promise` is sent after the store has answered: W (written) or D (deleting)."""
    chance = random.Random(seed)
    tell = os.write
    pages = pages_of(PAGES)
    arm(chance, int(chance.expovariate(1 / 60)))
    store = PageStore.open(root, SPACE, POLICY, PlainFiles())
    ranks = [Rank(store, PagePart.whole(component, PAGE), 8) for component in COMPONENTS]
    while True:
        number = chance.randrange(len(ranks))
        some = chance.sample(range(PAGES), chance.randint(1, 8))
        what = chance.random()
        if what < 0.6:
            answers = ranks[number].put([pages[page] for page in some])
            for page, answer in zip(some, answers, strict=True):
                assert answer.ok, answer.reason
                tell(promise, bytes([ord("W"), number, page, 10]))
        elif what < 0.8:
            ranks[number].get([pages[page] for page in some])
        elif what < 0.9:
            store.flush()
        elif what < 0.97:
            tell(promise, b"D\0\0\n")  # any page may go from here on
            store.evict(chance.randrange(200 << 10))
            store.collect()
        else:
            tell(promise, b"D\0\0\n")
            store.clear()


def headers_first() -> None:
    """An order of writes that a crash finds out: objects are announced, and then written."""

    def write(self, batch, todo) -> None:
        with self.catalog.lend({draft.place.segment for draft in todo}) as files:
            runs = [FileRun(files[d.place.segment], d.place.offset, d.address, batch.size) for d in todo]
            digests = tables(self.files.views(runs), batch.part.box.cells)
            self._announce(batch, [_Written(draft, each, "") for draft, each in zip(todo, digests, strict=True)])
            self.files.write(runs)

    SegmentObjects._write = write


def promises_early() -> None:
    """Headers wait for the next batch, as if it were cheaper to write them together."""
    waiting: dict[Segment, tuple[bytes, int]] = {}

    def append(self, blob: bytes) -> None:
        if self in waiting:
            os.pwrite(self.head_fd, *waiting.pop(self))
        waiting[self] = blob, self.parsed
        self.parsed += len(blob)

    Segment.append = append


MUTANTS: dict[str, Callable[[], None]] = {"": lambda: None, "headers first": headers_first, "early": promises_early}


def serve() -> None:
    """For each line `seed root` on stdin run the load in a fork, and answer with its signal and what it promised."""
    for line in sys.stdin:
        seed, root = line.rstrip("\n").split(" ", 1)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(reading)
                run(Path(root), int(seed), writing)
            except BaseException as error:  # a failure of the load, not the kill that it is there for
                os.write(2, f"seed {seed}: {error!r}\n".encode())
            os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            promises = pipe.read()
        _, status = os.waitpid(child, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        sys.stdout.write(f"{number} {promises.hex()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    MUTANTS[os.environ.get("KVMOVER_MUTANT", "")]()
    serve()
