"""A file system that fails: every call that the files engine makes of it, with any errno, once, now and then or always.

It is the system of one process: what a fresh, healthy one finds afterwards says what the trouble cost the others.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.store import HostBoot, PagePart, PageStore, Policy, clear_unused, shared_index, snapshot_file
from tests.store.faulty_disk import PLACES
from tests.store.segments import segments_of

WHOLE = PagePart.whole(GQA, PAGE)
POLICY = Policy(segment_bytes=4 * WHOLE.nbytes)
HERE, THERE, JUDGE = HostBoot(b"this machine...."), HostBoot(b"another machine."), HostBoot(b"who sees after..")
PAGES = pages_of(24)

CODES = [
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENOMEM,
    errno.EACCES,
    errno.EROFS,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.EINVAL,
    errno.ENOENT,
    errno.EAGAIN,
    errno.ENOLCK,
]
#: A disk that is full has room made by evicting.
FULL = (errno.ENOSPC, errno.EDQUOT)


class Often(Enum):
    ONCE = "once"
    SOMETIMES = "sometimes"
    ALWAYS = "always"


@dataclass(slots=True)
class FaultyCall:
    """One call of the system with one errno. It fails while `on`; `hits`: how often it has."""

    name: str
    code: int
    often: Often
    chance: random.Random
    on: bool = False
    hits: int = 0
    left: int = 0

    def is_due(self) -> bool:
        if not self.on:
            return False
        if self.often is Often.ONCE:
            self.left -= 1
            return self.left == 0
        return self.often is Often.ALWAYS or self.chance.random() < 0.3

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The call is the faulty one for the length of a block."""
        module, attribute = PLACES[self.name], self.name.rpartition(".")[2]
        real = getattr(module, attribute)
        setattr(module, attribute, self._failing(real))
        try:
            yield
        finally:
            setattr(module, attribute, real)

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self.is_due():
                return real(*arguments, **options)
            self.hits += 1
            if self.name == "fallocate":
                ctypes.set_errno(self.code)
                return -1
            if self.name == "close":  # the number is free whatever the system says
                real(*arguments)
            raise OSError(self.code, os.strerror(self.code))

        return call


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """What hangs ends by an exception, in the main thread."""

    def ended(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def shared_indexes() -> Iterator[None]:
    """An index of any size is shared, in a directory of its own, and nobody waits long for the turn to write one."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        mock.patch.multiple(shared_index, WORTH_BYTES=0, MEMORY=Path(memory)),
        mock.patch.object(snapshot_file, "_PATIENCE_S", 0.05),
    ):
        yield


def trial(root: Path, fault: FaultyCall) -> None:
    """One process in trouble beside a healthy one that has flushed 24 pages, or died then. AssertionError says what it
    cost the others, or what came out of the store that is not documented to.
    """
    chance = fault.chance
    fault.left = chance.randrange(1, 30)
    with shared_indexes(), no_longer_than(60), fault.installed():
        writer = PageStore.open(root, SPACE, POLICY, machine=HERE)
        assert all(r.ok for r in Rank(writer, WHOLE, 24).put(PAGES))
        writer.flush()
        if chance.random() < 0.5:  # as when it is killed
            for segment in segments_of(writer).catalog.segments.values():
                if segment.head_fd >= 0:
                    fcntl.flock(segment.head_fd, fcntl.LOCK_UN)
        store, flushed = _in_trouble(root, fault)
        evicted = store.counters.deleted["evicted"] if store else 0
        if store:
            rank, fresh = Rank(store, WHOLE), pages_of(4, "after")
            assert all(r.ok for r in rank.put(fresh)), "the trouble is over, and puts fail"
            assert all(r.ok for r in rank.get(fresh)), "the trouble is over, and reads fail"
            store.close()
        for machine in (JUDGE, HERE):
            with PageStore.open(root, SPACE, POLICY, machine=machine) as judge:
                got = Rank(judge, WHOLE, 24).get(PAGES)
                lost = [r for r in got if not r.ok]
                assert len(lost) <= evicted, f"{len(lost)} flushed pages lost for {machine}: {lost[0]}"
                own = Rank(judge, WHOLE, 64).get(flushed)
                assert evicted or all(r.ok for r in own), "pages that were flushed in trouble are lost"
        writer.close()


def _in_trouble(root: Path, fault: FaultyCall) -> tuple[PageStore | None, list[bytes]]:
    """Open a store and work with it, while the call fails; the store, and pages that it put and flushed."""
    chance, store = fault.chance, None
    fault.on = True
    machine = chance.choice((HERE, THERE))
    for _ in range(3):
        with suppress(StoreError):
            store = PageStore.open(root, SPACE, POLICY, machine=machine)
            break
    if store is None:
        fault.on = False
        return None, []
    ops = Operations(root, store, chance)
    for _ in range(12):
        ops.one()
    fault.on = False
    return store, sorted(ops.flushed)


class Operations:
    """What an engine asks of a store, in any order. Whatever is not documented to raise raises."""

    def __init__(self, root: Path, store: PageStore, chance: random.Random) -> None:
        self.root, self.store, self.chance = root, store, chance
        self.rank, self.turn = Rank(store, WHOLE), 0
        self.put, self.flushed = set[bytes](), set[bytes]()

    def one(self) -> None:
        name = self.chance.choice(("exists", "get", "get", "puts", "puts", "flush", "collect", "evict", "rarely"))
        getattr(self, f"_{name}")()

    def _exists(self) -> None:
        assert len(self.rank.exists(self.chance.sample(PAGES, 8))) == 8

    def _get(self) -> None:
        self.rank.get(self.chance.sample(PAGES, 8))

    def _puts(self) -> None:
        self.turn += 1
        pages = pages_of(4, f"turn {self.turn}")
        self.put |= {page for page, r in zip(pages, self.rank.put(pages), strict=True) if r.ok}

    def _flush(self) -> None:
        try:
            self.store.flush()
        except StoreError:
            self.put.clear()  # some of them are deleted, and would be put again
            return
        self.flushed |= self.put

    def _collect(self) -> None:
        self.store.collect()

    def _evict(self) -> None:
        self.store.evict(0)

    def _rarely(self) -> None:
        with suppress(OSError, StoreError):
            self.store.verify()
        self.store.stat()
        with suppress(StoreError):
            clear_unused(self.root, 3600)
