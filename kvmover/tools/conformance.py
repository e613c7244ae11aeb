"""StoreConformance checks a store of KV pages against the faults that every store must survive.

Subclass `StoreConformance` in a test file, say how a rank opens your store, and pytest runs the checks:

    class TestMyStore(StoreConformance):
        def open(self, folder, identity):
            return MySubject(folder, identity)

Each check stands for a fault of a store in use: sglang#16946, #24376, #33268, vllm#55191, LMCache#4991.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmover.layout import Component, CpOrder, Fleet
from kvmover.store import PagePart


def page_hash(number: int, salt: str = "") -> bytes:
    """Returns the 32 bytes that name page `number`; another `salt` names another page."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


@lru_cache(maxsize=512)
def page_content(page: bytes, component: Component, page_tokens: int) -> npt.NDArray[np.uint8]:
    """Returns a whole page, [head, layer, kv, token, byte of a row], read-only."""
    shape = (
        component.heads,
        component.layers,
        component.kv,
        component.extent(page_tokens),
        component.row_bytes,
    )
    seed = hashlib.sha256(page + component.name.encode()).digest()
    content = np.random.default_rng(list(seed)).integers(0, 256, shape, np.uint8)
    content.setflags(write=False)
    return content


def part_content(page: bytes, part: PagePart, page_tokens: int) -> bytes:
    """Returns the bytes of `part` of a page, packed `head layer kv token dim`."""
    whole = page_content(page, part.component, page_tokens)
    box = part.box
    heads = slice(box.heads.start, box.heads.stop)
    layers = slice(box.layers.start, box.layers.stop)
    return whole[heads, layers][:, :, :, list(box.tokens)].tobytes()


GQA = Component.attention(4, 8, 16, "bfloat16")
MLA = Component.mla(4, 64, "bfloat16")
ALONE = Fleet(page_tokens=16)


@dataclass(frozen=True, slots=True)
class Identity:
    """The rank that opens a store, its fleet and its model."""

    model: str = "model"
    weights: str = "1"
    tenant: str = ""
    component: Component = GQA
    page_tokens: int = 16
    fleet: Fleet = ALONE
    rank: int = 0

    def part(self, page: int = 0) -> PagePart | None:
        """Returns the rank's part of page `page` of an eight-page request, or None."""
        shard = self.fleet.shard(self.component, self.rank, 8 * self.page_tokens)
        return PagePart.of(self.component, shard, self.page_tokens, page)

    def payload(self, page: bytes) -> bytes:
        """Returns this rank's part of `page`: equal logical bytes in every fleet of a namespace."""
        part = self.part()
        assert part is not None
        salted = page_hash(
            0, page.hex() + repr((self.model, self.weights, self.tenant, self.component, self.page_tokens))
        )
        return part_content(salted, part, self.page_tokens)


class Subject(Protocol):
    """A rank's open store. No method raises: an unreadable page is None, an unwritten one False."""

    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> Sequence[bool]:
        """Store the payloads. Returns True for each page that needs no further write by this rank.

        True also if another rank is to write the page.
        """
        ...

    def get(self, pages: Sequence[bytes]) -> Sequence[bytes | None]:
        """Returns each page's payload, or None if it cannot be read; never wrong bytes."""
        ...

    def exists(self, pages: Sequence[bytes]) -> Sequence[bool]:
        """Returns True for each page that `get` would find now."""
        ...

    def flush(self) -> None:
        """Make stored pages safe from a power cut and visible to other machines."""
        ...

    def clean(self) -> None:
        """Evict about half of the pages, as a cleaner of your store does."""
        ...

    def close(self) -> None:
        """Release all resources. Stored pages stay in the folder."""
        ...


PAGES = [page_hash(number) for number in range(12)]


def put(subject: Subject, identity: Identity, pages: Sequence[bytes]) -> Sequence[bool]:
    """Put this rank's payloads of the pages. Returns True for each page that needs no further write."""
    answers = subject.put(pages, [identity.payload(page) for page in pages])
    assert len(answers) == len(pages), "a batch has as many answers as pages"
    return answers


def check(subject: Subject, identity: Identity, pages: Sequence[bytes]) -> list[bool]:
    """Read pages and compare their bytes. Returns True for each page read."""
    there = subject.exists(pages)
    got = subject.get(pages)
    assert len(there) == len(got) == len(pages), "a batch has as many answers as pages"
    for page, data in zip(pages, got, strict=True):
        assert data is None or bytes(data) == identity.payload(page), "bytes of something else under a valid key"
    return [data is not None for data in got]


class StoreConformance:
    """Checks of a store. A subclass says how a rank opens the store. `tmp_path` is pytest's."""

    def open(self, folder: Path, identity: Identity) -> Subject:
        """Open your store in `folder` as the rank of `identity`. The kit calls it many times for one folder."""
        raise NotImplementedError

    def open_elsewhere(self, folder: Path, identity: Identity) -> Subject:
        """Open the store on another machine that shares the folder; as `open` if machines make no difference."""
        return self.open(folder, identity)

    @contextmanager
    def failing(self, code: int) -> Generator[None]:
        """Fail every third system call with errno `code`. Override it if your store makes other calls."""
        places = [(os, name) for name in ("open", "pread", "preadv", "pwrite", "pwritev", "write")] + [(io, "open")]
        real = [getattr(*place) for place in places]
        calls = itertools.count()

        def sometimes(call: Callable[..., object]) -> Callable[..., object]:
            def called(*arguments: object, **options: object) -> object:
                if next(calls) % 3 == 2:
                    raise OSError(code, os.strerror(code))
                return call(*arguments, **options)

            return called

        for (module, name), call in zip(places, real, strict=True):
            setattr(module, name, sometimes(call))
        try:
            yield
        finally:
            for (module, name), call in zip(places, real, strict=True):
                setattr(module, name, call)

    def files(self, folder: Path) -> list[Path]:
        """Returns the files that the checks damage: all regular files, unless overridden."""
        return sorted(path for path in folder.rglob("*") if path.is_file())

    def filled(self, folder: Path, identity: Identity) -> None:
        """Open a store, put the kit's pages into it, and close it."""
        subject = self.open(folder, identity)
        assert all(put(subject, identity, PAGES))
        subject.close()

    def test_what_was_written_is_read_after_a_restart(self, tmp_path: Path) -> None:
        me = Identity()
        self.filled(tmp_path, me)
        subject = self.open(tmp_path, me)
        assert list(subject.exists(PAGES)) == [True] * len(PAGES)
        assert check(subject, me, PAGES) == [True] * len(PAGES)
        subject.close()

    def test_a_missing_page_fails_alone(self, tmp_path: Path) -> None:
        me = Identity()
        subject = self.open(tmp_path, me)
        put(subject, me, PAGES[:2] + PAGES[3:])
        assert list(subject.exists(PAGES)) == [True, True, False, *[True] * (len(PAGES) - 3)]
        assert check(subject, me, PAGES) == [True, True, False, *[True] * (len(PAGES) - 3)]
        subject.close()

    def test_a_torn_file_is_no_hit(self, tmp_path: Path) -> None:
        """Check that after a restart each page that exists is read whole."""
        me = Identity()
        self.filled(tmp_path, me)
        for path in self.files(tmp_path):
            os.truncate(path, path.stat().st_size // 2)
        subject = self.open(tmp_path, me)
        there = list(subject.exists(PAGES))
        assert check(subject, me, PAGES) == there, "a torn page counted as a hit"
        subject.close()

    def test_an_empty_file_is_no_hit(self, tmp_path: Path) -> None:
        me = Identity()
        self.filled(tmp_path, me)
        for path in self.files(tmp_path):
            os.truncate(path, 0)
        subject = self.open(tmp_path, me)
        assert not any(subject.exists(PAGES))
        assert not any(check(subject, me, PAGES))
        subject.close()

    def test_a_short_read_fails_alone(self, tmp_path: Path) -> None:
        """Shrink the largest file by a third of a page under an open store."""
        me = Identity()
        subject = self.open(tmp_path, me)
        put(subject, me, PAGES)
        largest = max(self.files(tmp_path), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size - len(me.payload(PAGES[0])) // 3)
        assert check(subject, me, PAGES).count(False) == 1
        subject.close()

    def test_damaged_bytes_are_never_served_and_can_be_written_again(self, tmp_path: Path) -> None:
        me = Identity()
        self.filled(tmp_path, me)
        for path in self.files(tmp_path):
            step = len(me.payload(PAGES[0])) // 2 + 1
            _flip(path, range(step // 2, path.stat().st_size, 3 * step))
        subject = self.open(tmp_path, me)
        check(subject, me, PAGES)
        assert all(put(subject, me, PAGES))
        assert check(subject, me, PAGES) == [True] * len(PAGES), "a bad page was taken for one that is there"
        subject.close()

    def test_tokens_of_a_damaged_cell_are_never_served(self, tmp_path: Path) -> None:
        """Read pages that one rank wrote whole with two ranks that hold every other token each.

        Each cell that a rank takes tokens from is checked as a whole. A store that keeps such fleets apart misses.
        """
        me = Identity()
        self.filled(tmp_path, me)
        for path in self.files(tmp_path):
            step, row = len(me.payload(PAGES[0])) // 2 + 1, me.component.row_bytes
            size = path.stat().st_size
            _flip(path, (at for first in range(step // 2, size, step) for at in (first, first + row) if at < size))
        for rank in range(2):
            reader = Identity(fleet=Fleet(cp=2, cp_order=CpOrder.TOKEN, page_tokens=16), rank=rank)
            subject = self.open(tmp_path, reader)
            check(subject, reader, PAGES)
            subject.close()

    def test_who_differs_in_anything_never_reads_my_pages(self, tmp_path: Path) -> None:
        me = Identity()
        self.filled(tmp_path, me)
        others = [
            replace(me, model="other"),
            replace(me, weights="2"),
            replace(me, tenant="other"),
            replace(me, component=Component.attention(4, 8, 32, "float8_e4m3fn")),
            replace(me, component=Component.attention(8, 4, 16, "bfloat16")),
            replace(me, component=replace(GQA, kv=1, dim=32)),
            replace(me, page_tokens=8, component=Component.attention(4, 8, 32, "bfloat16")),
        ]
        for other in others:
            subject = self.open(tmp_path, other)
            assert not any(subject.exists(PAGES)), other
            assert not any(check(subject, other, PAGES)), other
            put(subject, other, PAGES)
            check(subject, other, PAGES)
            subject.close()
        subject = self.open(tmp_path, me)
        assert all(check(subject, me, PAGES)), "others' pages took the place of mine"
        subject.close()

    def test_ranks_of_every_kind_keep_their_pages_apart(self, tmp_path: Path) -> None:
        """Write as TP, PP and CP ranks under one key; each reads its own bytes back."""
        for number, fleet in enumerate(_fleets()):
            folder = tmp_path / str(number)
            folder.mkdir()
            ranks = [replace(Identity(fleet=fleet), rank=rank) for rank in range(fleet.size)]
            ranks = [rank for rank in ranks if rank.part()]
            subjects = [self.open(folder, rank) for rank in ranks]
            for subject, rank in zip(subjects, ranks, strict=True):
                assert all(put(subject, rank, PAGES))
            for subject, rank in zip(subjects, ranks, strict=True):
                assert check(subject, rank, PAGES) == [True] * len(PAGES)
                subject.close()

    def test_a_page_that_lacks_a_rank_is_no_hit_for_who_needs_it(self, tmp_path: Path) -> None:
        """Check that a fleet of another shape reads the right bytes or a miss."""
        for number, fleet in enumerate(_fleets()):
            folder = tmp_path / str(number)
            folder.mkdir()
            for rank in range(1, fleet.size):
                writer = Identity(fleet=fleet, rank=rank)
                if writer.part():
                    subject = self.open(folder, writer)
                    put(subject, writer, PAGES)
                    subject.close()
            whole = Identity()
            subject = self.open(folder, whole)
            assert not any(subject.exists(PAGES))
            assert not any(check(subject, whole, PAGES))
            subject.close()

    def test_every_rank_has_as_many_answers_whatever_fails(self, tmp_path: Path) -> None:
        """Check that replicas, which wait for each other, get equal counts despite damage."""
        fleet = Fleet(tp=4, page_tokens=16)
        ranks = [Identity(component=MLA, fleet=fleet, rank=rank) for rank in range(4)]
        subjects = [self.open(tmp_path, rank) for rank in ranks]
        assert all(all(put(subject, rank, PAGES)) for subject, rank in zip(subjects, ranks, strict=True))
        for path in self.files(tmp_path):
            os.truncate(path, path.stat().st_size * 2 // 3)
        assert {len(check(subject, rank, PAGES)) for subject, rank in zip(subjects, ranks, strict=True)} == {len(PAGES)}
        assert {len(put(subject, rank, PAGES)) for subject, rank in zip(subjects, ranks, strict=True)} == {len(PAGES)}
        for subject in subjects:
            subject.close()

    def test_replicas_write_a_page_once(self, tmp_path: Path) -> None:
        alone, shared = tmp_path / "1", tmp_path / "4"
        sizes: list[int] = []
        for folder, tp in ((alone, 1), (shared, 4)):
            folder.mkdir()
            for rank in range(tp):
                me = Identity(component=MLA, fleet=Fleet(tp=tp, page_tokens=16), rank=rank)
                subject = self.open(folder, me)
                put(subject, me, PAGES)
                subject.close()
            sizes.append(sum(path.stat().st_size for path in self.files(folder)))
        assert sizes[1] < 2 * sizes[0], "replicas wrote their copies"

    def test_a_batch_may_be_split_while_it_is_written(self, tmp_path: Path) -> None:
        """Put a batch and read it as two, as a split tree node does, without losing a page."""
        me = Identity()
        writer, reader = self.open(tmp_path, me), self.open(tmp_path, me)
        done = threading.Event()

        def write() -> None:
            for _ in range(5):
                put(writer, me, PAGES)
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        while not done.is_set():
            for cut in (1, 5, 11):
                check(reader, me, PAGES[:cut])
                check(reader, me, PAGES[cut:])
        thread.join()
        assert check(reader, me, PAGES[:7]) + check(reader, me, PAGES[7:]) == [True] * len(PAGES)
        writer.close()
        reader.close()

    def test_a_cleaner_at_work_costs_hits_but_never_bytes(self, tmp_path: Path) -> None:
        me = Identity()
        subject, cleaner = self.open(tmp_path, me), self.open(tmp_path, me)
        stop = threading.Event()

        def clean() -> None:
            while not stop.is_set():
                cleaner.clean()

        thread = threading.Thread(target=clean)
        thread.start()
        try:
            for _ in range(25):
                assert all(put(subject, me, PAGES))
                check(subject, me, PAGES)
        finally:
            stop.set()
            thread.join()
        assert all(put(subject, me, PAGES))
        subject.close()
        cleaner.close()

    def test_what_one_machine_flushed_another_reads(self, tmp_path: Path) -> None:
        me = Identity()
        here, there = self.open(tmp_path, me), self.open_elsewhere(tmp_path, me)
        check(there, me, PAGES)
        assert all(put(here, me, PAGES[:8]))
        here.flush()
        assert check(there, me, PAGES[:8]) == [True] * 8
        assert all(put(there, me, PAGES))
        there.flush()
        assert check(here, me, PAGES) == [True] * len(PAGES)
        here.close()
        there.close()

    def test_what_was_flushed_outlives_a_power_cut(self, tmp_path: Path) -> None:
        """Cut each file at a random place after its end at the flush, with blocks after it unwritten."""
        me = Identity()
        for seed in range(6):
            chance, folder = random.Random(seed), tmp_path / str(seed)
            folder.mkdir()
            subject = self.open(folder, me)
            assert all(put(subject, me, PAGES[:6]))
            subject.flush()
            sizes = {path: path.stat().st_size for path in self.files(folder)}
            assert all(put(subject, me, PAGES[6:]))
            after = shutil.copytree(folder, tmp_path / f"{seed} after")
            subject.close()
            for path in self.files(after):
                _cut(path, sizes.get(folder / path.relative_to(after), 0), chance)
            survivor = self.open_elsewhere(after, me)
            assert check(survivor, me, PAGES)[:6] == [True] * 6, "a page that was flushed is gone"
            survivor.close()

    def test_a_cleaner_on_another_machine_costs_hits_but_never_bytes(self, tmp_path: Path) -> None:
        """Evict between the look-up and the read, beside a store that has files open."""
        me = Identity()
        here, cleaner = self.open(tmp_path, me), self.open_elsewhere(tmp_path, me)
        for _ in range(5):
            assert all(put(here, me, PAGES))
            here.flush()
            assert check(here, me, PAGES) == [True] * len(PAGES)
            here.exists(PAGES)
            cleaner.exists(PAGES)
            cleaner.clean()
            for page, data in zip(PAGES, here.get(PAGES), strict=True):
                assert data is None or bytes(data) == me.payload(page), "bytes of something else under a valid key"
        assert all(put(here, me, PAGES))
        assert check(here, me, PAGES) == [True] * len(PAGES)
        here.close()
        cleaner.close()

    def test_a_system_that_fails_now_and_then_costs_nobody_a_page(self, tmp_path: Path) -> None:
        """Check that no call raises, each page is answered, and the writer still reads all pages."""
        me = Identity()
        writer, reader = self.open(tmp_path, me), self.open(tmp_path, me)
        assert all(put(writer, me, PAGES))
        writer.flush()
        for code in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENOMEM):
            with self.failing(code):
                assert len(reader.exists(PAGES)) == len(PAGES)
                for page, data in zip(PAGES, reader.get(PAGES), strict=True):
                    assert data is None or bytes(data) == me.payload(page)
            assert check(writer, me, PAGES) == [True] * len(PAGES), "one process's trouble cost another a page"
        writer.close()
        reader.close()

    def test_a_disk_that_is_full_raises_nothing_and_spoils_nothing(self, tmp_path: Path) -> None:
        me = Identity()
        subject = self.open(tmp_path, me)
        assert all(put(subject, me, PAGES[:6]))
        for code in (errno.ENOSPC, errno.EDQUOT):
            with self.failing(code):
                put(subject, me, PAGES)
            check(subject, me, PAGES)
        assert all(put(subject, me, PAGES))
        assert check(subject, me, PAGES) == [True] * len(PAGES)
        subject.close()


def _flip(path: Path, places: Iterable[int]) -> None:
    """Flip one bit of each byte at these places of a file."""
    raw = bytearray(path.read_bytes())
    for at in places:
        raw[at] ^= 0x40
    path.write_bytes(raw)


def _cut(path: Path, safe: int, chance: random.Random) -> None:
    """Cut a file as a power cut does if its first `safe` bytes were on the disk."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in range(-(-safe // 4096) * 4096, size, 4096):
            if chance.random() < 0.3:
                file.seek(at)
                file.write(bytes(min(4096, size - at)))
        file.truncate(chance.randint(safe, size) if size > safe else size)


def _fleets() -> list[Fleet]:
    sizes = ({"tp": 2}, {"tp": 8}, {"pp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "cp_order": CpOrder.TOKEN})
    return [Fleet(page_tokens=16, **size) for size in sizes]  # pyright: ignore[reportArgumentType]
