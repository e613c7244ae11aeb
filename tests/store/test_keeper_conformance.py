"""The page store in a keeper's memory through the kit, with slabs that are not sealed, so that it can damage them."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from keepers import KeeperProcess, location
from test_store_conformance import PageStoreConformance, PageStoreSubject, space_of

from kvmover.store import PageStore
from kvmover.tools.conformance import PAGES, Identity


class KeeperSubject(PageStoreSubject):
    """A rank's store with the keeper of a folder."""

    def __init__(self, keeper: KeeperProcess, folder: Path, identity: Identity) -> None:
        self.keeper, self.folder = keeper, folder
        space = space_of(identity)
        self.over(PageStore.open(location(folder), space), space, identity)

    def close(self) -> None:
        before = self.keeper.ask("sessions", self.folder)
        super().close()
        self._left(before)

    def become(self, identity: Identity | None) -> None:
        before = self.keeper.ask("sessions", self.folder)
        super().become(identity)
        if identity is None:
            self._left(before)

    def _left(self, before: int) -> None:
        """The keeper hears of an end a moment later, and gives back what was not filled."""
        while self.keeper.ask("sessions", self.folder) >= before:
            time.sleep(0.001)


class TestKeeper(PageStoreConformance):
    """Slabs are as long as the kit's pages."""

    keeper: ClassVar[KeeperProcess]
    started: ClassVar[set[Path]] = set()

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _process(cls) -> Generator[None]:
        cls.keeper = KeeperProcess(seals=False)
        yield
        cls.keeper.close()

    def open(self, folder: Path, identity: Identity) -> KeeperSubject:
        if folder not in self.started:
            self.started.add(folder)
            self.keeper.start(folder, slab_bytes=len(PAGES) * len(Identity().payload(PAGES[0])))
        return KeeperSubject(self.keeper, folder, identity)

    def files(self, folder: Path) -> Sequence[Path]:
        return self.keeper.ask("slabs", folder)

    def test_what_was_flushed_outlives_a_power_cut(self, tmp_path: Path) -> None:
        """A keeper's memory goes with the power: nobody is promised more, and a keeper that begins anew has nothing."""
        me = Identity()
        subject = self.open(tmp_path, me)
        assert not any(subject.exists(PAGES))
        subject.close()
