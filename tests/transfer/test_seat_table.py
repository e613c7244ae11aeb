"""The table of peers by itself: which process has a rank id of an engine, and which may not take it."""

from __future__ import annotations

import pytest
from mover_fleets import Pair
from msgspec.structs import replace

from kvmover.errors import PeerRefused, PeerReplaced
from kvmover.layout import Fleet
from kvmover.transfer.peers import peer_table
from kvmover.transfer.peers.peer_table import Peer, Peers
from kvmover.transfer.protocol.handshake import Place, Rank

ONE, TWO = Fleet(page_tokens=4), Fleet(tp=2, page_tokens=4)
LINGER_S = 40.0


@pytest.fixture(scope="module")
def card() -> Rank:
    return Pair.of().src.movers[0]._core.card


def peer(card: Rank, name: str, generation: int, rank: int = 0, fleet: Fleet = TWO) -> Peer:
    return Peer(name, replace(card, place=Place("prefill", fleet, rank, generation)), b"")


def enter(peers: Peers, each: Peer, now: float = 0.0) -> tuple[str, ...]:
    """Admit a peer, and add it. Returns the names of those whose rank ids it took."""
    peers.admit(each.card, each.name, now, LINGER_S)
    over = peers.add(each, now)
    peers.check()
    return over


def test_a_process_has_one_rank_id_and_one_card(card: Rank):
    peers, first = Peers(), peer(card, "a", 5)
    enter(peers, first)
    with pytest.raises(PeerRefused, match="a is rank 0 of prefill.* and cannot be rank 1 of prefill.* as well"):
        enter(peers, peer(card, "a", 5, rank=1))
    with pytest.raises(PeerRefused, match="has another card than before"):
        enter(peers, Peer("a", replace(first.card, machine="another"), b""))
    assert enter(peers, Peer("a", replace(first.card, transport=b"new", registration=7), b"")) == ()
    assert peers.ranks("prefill") == {0}


def test_a_newer_process_takes_a_rank_id_and_no_other_does(card: Rank):
    peers = Peers()
    enter(peers, peer(card, "a", 5))
    enter(peers, peer(card, "b", 5, rank=1))
    for name, generation in (("old", 4), ("twin", 5)):
        with pytest.raises(PeerReplaced, match="was replaced by generation 5 a"):
            enter(peers, peer(card, name, generation))
    assert enter(peers, peer(card, "new", 6)) == ("a",)
    assert (peers.at("prefill", 0).name, peers.at("prefill", 1).name) == ("new", "b")
    assert peers.seen("prefill") == {0, 1}


def test_another_fleet_takes_all_rank_ids_if_it_is_newer_than_every_process_there(card: Rank):
    peers = Peers()
    enter(peers, peer(card, "a", 5))
    enter(peers, peer(card, "b", 9, rank=1))
    for generation in (4, 5, 8, 9):
        with pytest.raises(PeerReplaced, match="the engine came back as .*, generation 9"):
            enter(peers, peer(card, "late", generation, fleet=ONE))
    assert set(enter(peers, peer(card, "new", 10, fleet=ONE))) == {"a", "b"}
    assert peers.ranks("prefill") == peers.seen("prefill") == {0}
    assert peers.fleet("prefill") == ONE


def test_no_rank_of_a_new_fleet_is_of_a_process_older_than_the_last_fleet(card: Rank):
    """But for processes that the first of the new fleet was not newer than either."""
    peers = Peers()
    enter(peers, peer(card, "a", 3, fleet=Fleet(tp=3, page_tokens=4)))
    enter(peers, peer(card, "b", 5, rank=1, fleet=Fleet(tp=3, page_tokens=4)))
    enter(peers, peer(card, "c", 9))
    for generation in (3, 4, 5):
        with pytest.raises(PeerReplaced):
            enter(peers, peer(card, "d", generation, rank=1))
    enter(peers, peer(card, "d", 6, rank=1))
    silent = Peers()
    enter(silent, peer(card, "a", 9, fleet=ONE))
    silent.remove("a", 10.0)
    enter(silent, peer(card, "b", 9), 10.0 + LINGER_S)
    assert enter(silent, peer(card, "c", 9, rank=1), 11.0 + LINGER_S) == ()


def test_an_older_process_has_a_seat_once_its_holder_was_lost_for_long_and_not_heard_since(card: Rank):
    peers, old = Peers(), peer(card, "old", 4)
    holder = peer(card, "a", 5)
    enter(peers, holder)
    peers.remove("a", 100.0)
    assert (len(peers), peers.seen("prefill")) == (0, {0})
    peers.remove("a", 120.0)
    with pytest.raises(PeerReplaced, match="its seat is free in 1 s"):
        enter(peers, old, 99.0 + LINGER_S)
    enter(peers, holder, 99.0 + LINGER_S)
    assert enter(peers, old, 100.0 + LINGER_S) == ("a",), "it is connected and was not heard"
    enter(peers, peer(card, "b", 6), 200.0)
    peers.remove("b", 200.0)
    enter(peers, peer(card, "b", 6), 201.0)
    peers.is_back("b")
    with pytest.raises(PeerReplaced):
        enter(peers, peer(card, "old", 4), 300.0 + LINGER_S)


def test_a_process_that_was_replaced_and_is_heard_again_gives_its_successor_no_more_time(card: Rank):
    peers = Peers()
    enter(peers, peer(card, "a", 5))
    enter(peers, peer(card, "b", 6))
    peers.remove("b", 100.0)
    peers.is_back("a")
    with pytest.raises(PeerReplaced, match="its seat is free in 1 s"):
        enter(peers, peer(card, "old", 4), 99.0 + LINGER_S)
    assert enter(peers, peer(card, "old", 4), 100.0 + LINGER_S) == ()
    peers.vacate("prefill", (0,))
    peers.is_back("old")
    assert peers.seen("prefill") == frozenset(), "a vacated seat stays vacant"


def test_of_engines_without_a_rank_here_the_one_seen_longest_ago_is_forgotten(
    card: Rank, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peer_table, "MAX_ENGINES", 2)
    peers = Peers()
    for number, engine in enumerate(("here", "one", "two", "three")):
        given = peer(card, engine, 5)
        enter(peers, Peer(engine, replace(given.card, place=replace(given.card.place, engine=engine)), b""))
        if number:
            peers.remove(engine, float(number))
    seen = [engine for engine in ("here", "one", "two", "three") if peers.seen(engine)]
    assert seen == ["here", "three"]


def test_a_process_that_was_replaced_takes_nothing_along_when_it_is_lost(card: Rank):
    peers = Peers()
    enter(peers, peer(card, "a", 5))
    enter(peers, peer(card, "b", 6))
    peers.remove("a", 100.0)
    assert peers.at("prefill", 0).name == "b"
    with pytest.raises(PeerReplaced):
        enter(peers, peer(card, "c", 5), 1000.0)


def test_a_rank_id_that_was_vacated_or_whose_processes_are_dead_is_anybodys(card: Rank):
    for free in (lambda peers: peers.vacate("prefill", (0,)), lambda peers: peers.bury("prefill", 0)):
        peers = Peers()
        enter(peers, peer(card, "a", 5))
        enter(peers, peer(card, "b", 5, rank=1))
        peers.remove("a", 1.0)
        free(peers)
        assert peers.seen("prefill") == {1}
        assert enter(peers, peer(card, "old", 1), 2.0) == ()
        with pytest.raises(PeerReplaced):
            enter(peers, peer(card, "older", 1, rank=1), 2.0)
    peers.vacate("a stranger", (0,))
    peers.vacate("prefill", (0, 1))
    assert peers.seen("prefill") == frozenset()
    assert not peers._seen, "an engine without processes is not remembered"
