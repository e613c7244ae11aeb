"""Our own store, and one with the faults of others, through the kit that others can use."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvmover.errors import StoreError
from kvmover.store import HostBoot, Namespace, PageStore, elected
from kvmover.store.files import PlainFiles, memory_of_buffer
from kvmover.store.nixl_files import NixlFiles
from kvmover.store.tenure import LEFT, NOWHERE
from kvmover.tools.conformance import PAGES, Identity, StoreConformance, check, page_hash, put
from tests.store.one_call_files import OneCallFiles


def space_of(identity: Identity) -> Namespace:
    return Namespace(identity.model, identity.weights, identity.page_tokens, identity.tenant)


class PageStoreSubject:
    """The page store as the kit drives it."""

    def __init__(self, folder: Path, identity: Identity, files, machine: HostBoot | None = None) -> None:
        space = space_of(identity)
        self.over(PageStore.open(folder, space, files=files, machine=machine), space, identity)

    def over(self, store: PageStore, space: Namespace, identity: Identity) -> None:
        """Memory of its own over a store that is open."""
        part = identity.part()
        assert part is not None
        self.store, self.size, self.part = store, part.nbytes, part
        self.buffer = mmap.mmap(-1, 16 * max(self.size, 4096))
        self.memory = memory_of_buffer(self.buffer)
        self.store.register(self.memory)
        self.writes = partial(elected, identity.component, identity.fleet, identity.rank)
        self.view = self.store.view(space, part, self.writes)

    def become(self, identity: Identity | None) -> None:
        """Go on in the namespace of `identity`, or in none, with a view of it."""
        self.store.become(identity and space_of(identity))
        self.view = self.store.view(space_of(identity or Identity()), self.part, self.writes)

    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bool]:
        for number, payload in enumerate(payloads):
            self.buffer[number * self.size : (number + 1) * self.size] = payload
        return [answer.ok for answer in self.view.put(pages, self.addresses(pages))]

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        answers = self.view.get(pages, self.addresses(pages))
        places = [slice(number * self.size, (number + 1) * self.size) for number in range(len(pages))]
        return [self.buffer[place] if answer.ok else None for answer, place in zip(answers, places, strict=True)]

    def addresses(self, pages: Sequence[bytes]) -> list[int]:
        return [self.memory.address + number * self.size for number in range(len(pages))]

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return self.view.exists(pages)

    def flush(self) -> None:
        self.store.flush()

    def clean(self) -> None:
        self.store.evict(self.store.stat().held_bytes // 2)
        self.store.collect()

    def close(self) -> None:
        self.store.close()


class PageStoreConformance(StoreConformance):
    """What the page store says beyond the kit, whatever is under it: a store that is open goes on in another namespace.

    Each identity's pages have bytes of their own, so a page of the wrong namespace shows.
    """

    def test_a_store_goes_on_in_another_namespace_and_finds_its_pages_when_it_comes_back(self, tmp_path: Path) -> None:
        me, other = Identity(), Identity(weights="2")
        subject: Any = self.open(tmp_path, me)
        assert all(put(subject, me, PAGES[:6]))
        subject.become(other)
        assert not any(check(subject, other, PAGES))
        assert all(put(subject, other, PAGES[3:]))
        assert check(subject, other, PAGES) == [False] * 3 + [True] * 9
        subject.become(me)
        assert check(subject, me, PAGES) == [True] * 6 + [False] * 6
        subject.close()
        with pytest.raises(StoreError, match="closed"):
            subject.store.become(other)

    def test_in_no_namespace_nothing_is_found_put_or_written(self, tmp_path: Path) -> None:
        me = Identity()
        subject: Any = self.open(tmp_path, me)
        assert all(put(subject, me, PAGES[:6]))
        subject.become(None)
        before = {path: path.read_bytes() for path in self.files(tmp_path)}
        assert not any(put(subject, me, PAGES))
        assert {answer.reason for answer in subject.view.put(PAGES[:2], subject.addresses(PAGES[:2]))} == {NOWHERE}
        assert not any(check(subject, me, PAGES))
        subject.flush()
        subject.store.collect()
        store = subject.store
        assert (store.evict(1), store.clear(), store.stat().pages, store.verify().objects) == (0, 0, 0, 0)
        assert {path: path.read_bytes() for path in self.files(tmp_path)} == before
        subject.become(me)
        assert check(subject, me, PAGES) == [True] * 6 + [False] * 6
        subject.close()

    def test_puts_under_way_end_in_the_namespace_they_began_in_or_fail(self, tmp_path: Path) -> None:
        """A thread keeps its view while the store goes on: page by page, so that every moment of a put is met."""
        me = Identity()
        subject: Any = self.open(tmp_path, me)
        kept, written, stop = subject.view, set[bytes](), threading.Event()
        mine = [page_hash(number, "under way") for number in range(400)]
        scratch = mmap.mmap(-1, max(subject.size, 4096))
        memory = memory_of_buffer(scratch)
        subject.store.register(memory)

        def write() -> None:
            for page in mine:
                scratch[: subject.size] = me.payload(page)
                if kept.put([page], [memory.address])[0].ok:
                    written.add(page)
                if stop.is_set():
                    return

        thread = threading.Thread(target=write)
        thread.start()
        try:
            while len(written) < 3 and thread.is_alive():
                time.sleep(0.001)
            others = [Identity(weights=str(number)) for number in range(2, 6)]
            for other in others:
                subject.become(other)
                assert not any(subject.exists(mine))
                assert all(put(subject, other, PAGES))
        finally:
            stop.set()
            thread.join()
        assert {answer.reason for answer in kept.put(mine[:1], [memory.address]) if not answer.ok} == {LEFT}
        assert not any(kept.exists(mine))
        assert not any(answer.ok for answer in kept.get(mine[:1], [memory.address]))
        assert not any(subject.exists(mine))
        subject.become(me)
        assert [page for page, there in zip(mine, subject.exists(mine), strict=True) if there] == [
            page for page in mine if page in written
        ]
        for first in range(0, len(mine), len(PAGES)):
            check(subject, me, mine[first : first + len(PAGES)])
        subject.close()


class TestPageStore(PageStoreConformance):
    def open(self, folder: Path, identity: Identity) -> PageStoreSubject:
        return PageStoreSubject(folder, identity, PlainFiles())

    def open_elsewhere(self, folder: Path, identity: Identity) -> PageStoreSubject:
        return PageStoreSubject(folder, identity, PlainFiles(), HostBoot(b"another machine."))


class TestPageStoreThroughTheRecipesFiles(PageStoreConformance):
    def open(self, folder: Path, identity: Identity) -> PageStoreSubject:
        return PageStoreSubject(folder, identity, OneCallFiles())


class TestPageStoreThroughNixl(PageStoreConformance):
    def open(self, folder: Path, identity: Identity) -> PageStoreSubject:
        pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")
        return PageStoreSubject(folder, identity, NixlFiles())


class Careless:
    """One file a page, written in place, there if it can be opened: a store as several in use are."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder, self.size = folder, len(identity.payload(bytes(32)))
        self.name = f"{identity.model}_{identity.fleet.coordinate(identity.rank).tp}_{identity.fleet.tp}"

    def path(self, page: bytes) -> Path:
        return self.folder / f"{page.hex()}_{self.name}"

    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bool]:
        for page, payload in zip(pages, payloads, strict=True):
            if not self.path(page).exists():
                self.path(page).write_bytes(payload)
        return [True] * len(pages)

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        if not all(self.exists(pages)):
            return [None] * len(pages)
        return [self.path(page).read_bytes() for page in pages]

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return [self.path(page).exists() for page in pages]

    def flush(self) -> None: ...

    def clean(self) -> None:
        for path in sorted(self.folder.iterdir())[::2]:
            path.unlink(missing_ok=True)

    def close(self) -> None: ...


class CarelessConformance(StoreConformance):
    def open(self, folder: Path, identity: Identity) -> Careless:
        return Careless(folder, identity)


#: What a careless store gets right all the same.
HARMLESS = {
    "test_what_was_written_is_read_after_a_restart",
    "test_a_batch_may_be_split_while_it_is_written",
    "test_what_one_machine_flushed_another_reads",
}
CHECKS = sorted({name for name in dir(StoreConformance) if name.startswith("test_")} - HARMLESS)


@pytest.mark.parametrize("name", [name for name in CHECKS if "cleaner" not in name])
def test_a_careless_store_is_found_out(name: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, OSError)):
        getattr(CarelessConformance(), name)(tmp_path)
