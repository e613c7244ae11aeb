"""A keeper whose state machine raises: one session ends, and the pages of all others are there, and right."""

from __future__ import annotations

import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from keepers import KeeperProcess, location
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.layout import Fleet
from kvmover.store import Namespace, PagePart, PageStore, Policy
from kvmover.store.keeper.messages import Listed, ListNamespaces, decode_answer, encode
from tests.proofs import family

ALONE = Fleet(page_tokens=PAGE)
PAGE_BYTES = 32 << 10
OTHER = Namespace("other", "rev-1", PAGE)
PARTS = ("_seal", "_drop", "_added", "_append", "encode_entry", "decode_part", "_evict", "_carry", "_make_room")
CASES = [("_attach", 0), *((part, calls) for part in PARTS for calls in range(4))]
FEW = [("_attach", 0), ("_seal", 2), ("_append", 0), ("_drop", 1), ("_evict", 0), ("_carry", 0)]


@pytest.fixture(scope="module")
def process() -> Generator[KeeperProcess]:
    keeper = KeeperProcess()
    yield keeper
    keeper.close()


def whole(store: PageStore, space: Namespace = SPACE) -> Rank:
    return Rank(store, PagePart.held(GQA, ALONE, 0, PAGE), 16, space)


def opened(folder: Path, generation: int) -> PageStore:
    """A store that evicts of its own namespace alone."""
    return PageStore.open(location(folder, "engine", generation), SPACE, Policy(quota_bytes=16 * PAGE_BYTES))


def live(folder: Path, generation: int) -> None:
    """One life of a client that writes more than there is room for, beside itself, and clears up."""
    with opened(folder, generation) as first:
        whole(first).put(pages_of(6, f"first {generation}"))
        with opened(folder, generation + 1) as second:
            for batch in range(3):
                whole(second).put(pages_of(4, f"{generation} {batch}"))
                whole(second).get(pages_of(2, f"{generation} {batch}"))
                second.flush()
            second.evict(2 * PAGE_BYTES)


@pytest.mark.parametrize(("part", "calls"), family(CASES, FEW))
def test_who_makes_a_keeper_raise_is_disconnected_and_everybody_else_keeps_what_is_his(
    process: KeeperProcess, tmp_path: Path, part: str, calls: int
) -> None:
    process.start(tmp_path, 24 * PAGE_BYTES, 4 * PAGE_BYTES)
    kept = pages_of(4, "kept")
    with PageStore.open(location(tmp_path), OTHER) as honest, PageStore.open(location(tmp_path), SPACE) as follower:
        mine = whole(honest, OTHER)
        assert all(answer.ok for answer in mine.put(kept))
        honest.flush()
        process.ask("break", tmp_path, part, calls)
        for generation in (1, 3):
            try:
                live(tmp_path, generation)
            except StoreError:
                assert process.ask("faults", tmp_path) == 1, "somebody was refused who did nothing"
            process.ask("check", tmp_path)
            written = [page for batch in range(3) for page in pages_of(4, f"{generation} {batch}")]
            follower.flush()
            with PageStore.open(location(tmp_path), SPACE) as fresh:
                there = whole(fresh).exists(written)
                assert whole(follower).exists(written) == there, "the journal says other than the keeper"
                assert [answer.ok for answer in whole(fresh).get(written)] == there
        assert process.ask("faults", tmp_path) == 1, "this test breaks nothing"
        with PageStore.open(location(tmp_path), OTHER) as fresh:
            assert all(answer.ok for answer in whole(fresh, OTHER).get(kept))
        assert all(answer.ok for answer in mine.get(kept))


def test_every_number_that_a_list_may_begin_at_is_answered(process: KeeperProcess, tmp_path: Path) -> None:
    process.start(tmp_path)
    with (
        PageStore.open(location(tmp_path), SPACE) as store,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as near,
    ):
        pages = pages_of(4)
        assert all(answer.ok for answer in whole(store).put(pages))
        near.settimeout(10)
        near.connect(str(tmp_path / "keeper.sock"))
        for first in (1, 1 << 40, (1 << 63) - 1):
            near.send(encode(ListNamespaces(first)))
            assert decode_answer(near.recv(4096)) == Listed([])
        assert all(answer.ok for answer in whole(store).get(pages))
    assert process.ask("faults", tmp_path) == 0
