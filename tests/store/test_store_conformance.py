"""Our own store, and one with the faults of others, through the kit that others can use."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from kvmover.store import Machine, Namespace, PageStore, elected
from kvmover.store.files import PlainFiles, memory_of_buffer
from kvmover.store.nixl_files import NixlFiles
from kvmover.testing.store import Identity, StoreConformance
from tests.store.one_call_files import OneCallFiles


class PageStoreSubject:
    """The page store as the kit drives it."""

    def __init__(self, folder: Path, identity: Identity, files, machine: Machine | None = None) -> None:
        space = Namespace(identity.model, identity.weights, identity.page_tokens, identity.tenant)
        self.over(PageStore.open(folder, space, files=files, machine=machine), space, identity)

    def over(self, store: PageStore, space: Namespace, identity: Identity) -> None:
        """Memory of its own over a store that is open."""
        part = identity.part()
        assert part is not None
        self.store, self.size = store, part.nbytes
        self.buffer = mmap.mmap(-1, 16 * max(self.size, 4096))
        self.memory = memory_of_buffer(self.buffer)
        self.store.register(self.memory)
        writes = partial(elected, identity.component, identity.fleet, identity.rank)
        self.view = self.store.view(space, part, writes)

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


class TestPageStore(StoreConformance):
    def open(self, folder: Path, identity: Identity) -> PageStoreSubject:
        return PageStoreSubject(folder, identity, PlainFiles())

    def open_elsewhere(self, folder: Path, identity: Identity) -> PageStoreSubject:
        return PageStoreSubject(folder, identity, PlainFiles(), Machine(b"another machine."))


class TestPageStoreThroughTheRecipesFiles(StoreConformance):
    def open(self, folder: Path, identity: Identity) -> PageStoreSubject:
        return PageStoreSubject(folder, identity, OneCallFiles())


class TestPageStoreThroughNixl(StoreConformance):
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
