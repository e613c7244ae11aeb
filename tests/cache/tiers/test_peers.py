"""Engines of unlike shape read from each other's hosts what they would otherwise compute, or read from storage."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from peer_rig import CONFIG, LendingEngine, SharedNetwork
from rig import HYBRID, LATENT, PLAIN, SPARSE, until

from kvmover.cache.ledger import Loss
from kvmover.cache.peers import PeerQuestion, PeerRead, PeerTerms
from kvmover.cache.peers.questions import question_of
from kvmover.cache.prefix import FULL, Tier, WriteBack
from kvmover.cache.tiers import TierError, unlink
from kvmover.errors import PlanError
from kvmover.layout import Fleet
from kvmover.layout.fleet import CpOrder
from kvmover.plan.cost import Route
from kvmover.transfer import Mover
from kvmover.transfer.peers.asks import Asks
from tests.proofs import family

PROMPT = list(range(65))
TP4, TP2 = Fleet(tp=4, page_tokens=8), Fleet(tp=2, page_tokens=4)
PP2TP2, CP2 = Fleet(tp=2, pp=2, page_tokens=16), Fleet(cp=2, page_tokens=4)
CP2TP2 = Fleet(tp=2, cp=2, page_tokens=4, cp_order=CpOrder.TOKEN)


@pytest.fixture
def network():
    return SharedNetwork()


@pytest.mark.parametrize("model", [PLAIN, LATENT, SPARSE], ids=["plain", "latent", "sparse"])
@pytest.mark.parametrize(
    ("lender", "borrower"),
    family(
        [(TP4, TP2), (TP2, PP2TP2), (CP2, TP4), (CP2TP2, CP2), (PP2TP2, CP2TP2)], few=[(TP4, TP2), (PP2TP2, CP2TP2)]
    ),
)
def test_an_engine_of_another_shape_reads_what_a_peer_has_on_its_host(network, model, lender, borrower):
    orders = "layer kv page token head dim", "page head layer kv token dim"
    first = LendingEngine(network, "first", lender, model=model, order=orders[0])
    second = LendingEngine(network, "second", borrower, ["first"], model=model, order=orders[1])
    second.connect(first)
    first.serve(PROMPT)
    for restore in second.serve(PROMPT):
        assert (restore.tokens, restore.credit.peer_tokens, restore.lost) == (64, 64, {})
    first.close()
    second.close()


def pair(network, lender=TP4, borrower=TP2, **more):
    first = LendingEngine(network, "first", lender)
    second = LendingEngine(network, "second", borrower, ["first"], **more)
    second.connect(first)
    return first, second


def begun(engine, prompt=PROMPT):
    return [rank.controller.restore(prompt) for rank in engine.ranks]


def ended(engine, restores, prompt=PROMPT):
    until(engine.ranks, lambda: all(restore.done for restore in restores))
    for rank, restore in zip(engine.ranks, restores, strict=True):
        rank.look_at(prompt, restore)
        rank.compute(prompt, restore)
    engine.settle()


def reads_held(network, engine):
    """Until a read of a peer's memory is in flight, and lands no more by itself."""
    until(engine.ranks, lambda: bool(network._held))


def test_a_latent_that_ranks_hold_once_a_node_is_lent_and_borrowed(network, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = LendingEngine(network, "first", TP4, model=LATENT, shared=tmp_path / "first")
    second = LendingEngine(network, "second", TP2, ["first"], model=LATENT, shared=tmp_path / "second")
    second.connect(first)
    for rank in (*first.ranks, *second.ranks):
        unlink(rank.tiered_pools[0].share)
    first.serve(PROMPT)
    for restore in second.serve(PROMPT):
        assert (restore.tokens, restore.credit.peer_tokens) == (64, 64)
    first.close()
    second.close()


def test_what_was_borrowed_is_lent_again(network):
    first, second = pair(network)
    third = LendingEngine(network, "third", PP2TP2, ["second"])
    third.connect(second)
    first.serve(PROMPT)
    second.serve(PROMPT[:33])
    assert second.lent() == [8, 8]
    for restore in third.serve(PROMPT):
        assert (restore.tokens, restore.credit.peer_tokens) == (32, 32)
    for engine in (first, second, third):
        engine.close()


def test_a_prefix_comes_from_the_host_and_the_rest_of_it_from_a_peer(network):
    first, second = pair(network)
    first.serve(PROMPT)
    second.serve(PROMPT[:21])
    (restore, _) = second.serve(PROMPT)
    assert (restore.credit.device_tokens, restore.credit.peer_tokens, restore.lost) == (20, 44, {})
    assert second.ranks[0].controller.meter.counts["borrowed_pages"] == 4 + 11
    first.close()
    second.close()


def test_of_more_engines_than_may_be_asked_a_prompt_is_looked_for_at_the_same_and_prompts_spread():
    engines = [f"10.0.0.{number}:8400" for number in range(40)]
    questions = [question_of("r", bytes([page]), engines, most=4) for page in range(100)]
    assert questions == [question_of("r", bytes([page]), engines, most=4) for page in range(100)]
    assert all(len({*each.engines}) == 4 for each in questions)
    assert {engine for each in questions for engine in each.engines} == {*engines}
    assert question_of("r", b"", engines, 4, "10.0.1.1:1").engines == ("10.0.1.1:1",)  # a named one alone


def test_a_named_source_is_read_though_the_engine_asks_nobody_and_its_mark_tells_it_apart(network):
    first, second = LendingEngine(network, "first", TP4), LendingEngine(network, "second", TP2)
    second.connect(first)
    first.serve(PROMPT)
    for source, tokens, miss in ((None, 0, "needless"), ("other", 0, "unreachable"), ("first", 64, "needless")):
        restores = [rank.controller.prefetch(rank.tree.key(PROMPT), 64, source) for rank in second.ranks]
        until(second.ranks, lambda restores=restores: all(restore.done for restore in restores))
        assert {restore.state.peer_tokens for restore in restores} == {tokens}
        assert {restore.miss for restore in restores} == {miss}
        for rank, restore in zip(second.ranks, restores, strict=True):
            rank.controller.release(restore)
        second.settle()
    first.close()
    second.close()


def test_what_no_peer_has_is_computed_and_the_ledger_knows_no_loss(network):
    first, second = pair(network)
    first.serve(PROMPT)
    for restore in second.serve([7, *PROMPT]):
        assert (restore.tokens, restore.reusable_tokens, restore.lost) == (0, 0, {})
    first.close()
    second.close()


def test_a_peer_is_read_where_storage_has_no_more_and_storage_where_it_has(network, tmp_path):
    first, second = pair(network, root=tmp_path)
    second.serve(PROMPT[:41])
    second.forget()
    first.serve(PROMPT[:41])
    credit = second.serve(PROMPT[:41])[0].credit
    assert (credit.peer_tokens, credit.storage_tokens) == (40, 0)
    second.serve(PROMPT)
    second.forget()
    credit = second.serve(PROMPT)[0].credit
    assert (credit.peer_tokens, credit.storage_tokens) == (0, 64)
    until(first.ranks, lambda: all(rank.peers.counts().loans == 0 for rank in first.ranks))
    first.close()
    second.close()


def test_of_two_peers_the_one_that_has_more_is_read(network):
    first, second = LendingEngine(network, "first", TP4), LendingEngine(network, "second", PP2TP2)
    third = LendingEngine(network, "third", TP2, ["first", "second"])
    third.connect(first)
    third.connect(second)
    first.serve(PROMPT[:25])
    second.serve(PROMPT)
    for restore in third.serve(PROMPT):
        assert restore.credit.peer_tokens == 64
    assert [rank.peers._mover.meter.counts["sent_bytes"] > 0 for rank in first.ranks] == [False] * 4
    until(first.ranks, lambda: all(rank.peers.counts().loans == 0 for rank in first.ranks))
    for engine in (first, second, third):
        engine.close()


@pytest.mark.parametrize("stored", [False, True], ids=["no storage", "storage"])
def test_a_page_that_its_lender_needs_is_recalled_and_whoever_reads_it_takes_nothing_for_right(
    network, tmp_path, stored
):
    first, second = pair(network, root=tmp_path if stored else None)
    if stored:
        second.serve(PROMPT)
        second.forget()
    first.serve(PROMPT)
    network.hold()
    restores = begun(second)
    reads_held(network, second)
    first.forget()  # and its pages are full of garbage, which the reads bring
    network.deliver()
    ended(second, restores)
    for restore in restores:
        assert restore.credit.peer_tokens == 0
        assert restore.credit.storage_tokens == (64 if stored else 0)
        assert restore.lost == ({} if stored else {Loss.READ_FAILED: 64})
    assert first.lent() == [0] * 4
    first.close()
    second.close()


def test_a_peer_that_dies_while_it_lends_costs_a_miss(network):
    first, second = pair(network)
    first.serve(PROMPT)
    network.hold()
    restores = begun(second)
    reads_held(network, second)
    for rank in first.ranks:
        network.cut(rank.peers._mover._transport.name)
    network.deliver()
    ended(second, restores)
    for restore in restores:
        assert (restore.tokens, restore.lost) == (0, {Loss.READ_FAILED: 64})
    second.forget()
    for restore in second.serve(PROMPT):  # nobody is there to be asked
        assert (restore.tokens, restore.lost) == (0, {})
    first.close()
    second.close()


def test_a_peer_that_hangs_costs_a_miss_and_what_it_may_still_write_is_nobody_elses(network):
    terms = PeerTerms(("first",), ask_s=5.0, read_s=0.2)
    direct = replace(CONFIG, route=Route.DIRECT)  # so that what is late is written into pages, not into an arena
    first, second = pair(network, terms=terms, pages=(32, 40), config=direct)
    first.serve(PROMPT)
    network.hold()
    restores = begun(second)
    reads_held(network, second)
    until(second.ranks, lambda: all(restore.done for restore in restores))
    for rank, restore in zip(second.ranks, restores, strict=True):
        assert (restore.tokens, restore.lost) == (0, {Loss.READ_FAILED: 64})
        assert rank.controller._restores.quarantined
        assert len(rank.allocator.host[FULL]) == 40 - 16, "no rank has them back"
        rank.compute(PROMPT, restore)
    until(second.ranks, lambda: all(rank.tree.sizes(FULL, Tier.HOST).protected == 16 for rank in second.ranks))
    for rank in second.ranks:
        rank.poison_free()
    network.deliver()  # and the late bytes hit nothing that is used
    second.settle()
    for rank in second.ranks:
        rank.evict(100)
    for restore in second.serve(PROMPT):
        assert restore.credit.host_tokens == 64
    first.close()
    second.close()


def test_a_peer_that_never_answers_is_not_waited_for_again_soon(network, monkeypatch):
    first, second = pair(network, terms=PeerTerms(("first",), ask_s=0.05, quiet_s=60.0))
    first.serve(PROMPT)
    monkeypatch.setattr(Asks, "hear", lambda self, peer, message: None)
    for _ in range(2):
        for restore in second.serve(PROMPT):
            assert restore.credit.peer_tokens == 0
        second.forget()
    asked = [rank.controller.meter.stages["ask"] for rank in second.ranks]
    assert [each.count for each in asked] == [2, 2]
    assert second.ranks[0].peers._quiet.keys() == {"first"}
    first.close()
    second.close()


def test_a_page_that_one_rank_of_the_lender_lacks_is_lent_by_none(network):
    first, second = pair(network)
    first.serve(PROMPT)
    inventory = first.ranks[3].peers._inventory
    inventory.drop(list(inventory._hashes)[4:])
    restores = second.serve(PROMPT)
    assert [restore.credit.peer_tokens for restore in restores] == [32, 32]
    assert {Loss.RANK_MINIMUM: 32} in [restore.lost for restore in restores]
    first.close()
    second.close()


def test_a_rank_that_reaches_no_peer_ends_as_the_others_do(network):
    first = LendingEngine(network, "first", TP4)
    second = LendingEngine(network, "second", TP2, ["first"])
    for peer in first.ranks:
        second.ranks[0].peers.connect(peer.peers.card)
    first.serve(PROMPT)
    restores = second.serve(PROMPT)
    assert [restore.tokens for restore in restores] == [0, 0]
    assert [restore.lost for restore in restores] == [{Loss.RANK_MINIMUM: 64}, {}]
    assert len({rank.controller.collectives.serial for rank in second.ranks}) == 1
    first.close()
    second.close()


def test_a_host_without_room_borrows_nothing(network):
    first, second = pair(network, pages=(32, 20))
    first.serve(PROMPT)
    held = [rank.allocator.host[FULL].take(12) for rank in second.ranks]
    restores = begun(second)
    until(second.ranks, lambda: all(restore.done for restore in restores))
    for rank, restore, ids in zip(second.ranks, restores, held, strict=True):
        assert (restore.tokens, restore.lost) == (0, {Loss.HOST_CAPACITY: 64})
        rank.controller.release(restore)
        rank.allocator.host[FULL].give(ids)
    second.settle()
    first.close()
    second.close()


def test_a_restore_that_is_given_up_stops_its_read(network):
    first, second = pair(network)
    first.serve(PROMPT)
    network.hold()
    restores = begun(second)
    reads_held(network, second)
    for rank, restore in zip(second.ranks, restores, strict=True):
        rank.controller.abort(restore)
    network.deliver()
    second.settle()
    assert not any(rank.peers.queued for rank in second.ranks)
    first.close()
    second.close()


def test_a_mover_that_is_closed_borrows_and_lends_nothing_and_ends_what_is_asked(network):
    first, second = pair(network)
    first.serve(PROMPT)
    for rank in second.ranks:
        rank.peers.close()
    for restore in second.serve(PROMPT):
        assert restore.tokens == 0
    second.forget()
    first.close()
    second.close()


def test_trees_whose_pages_have_no_name_on_the_host_are_refused(network):
    for more, said in (({"tiers": WriteBack()}, "write through"), ({"model": HYBRID}, "not kept for every page")):
        with pytest.raises(TierError, match=said):
            LendingEngine(network, "first", TP4, **more)


def test_page_tables_of_a_read_may_be_changed_before_the_movers_thread_has_looked_at_them(network, monkeypatch):
    first, second = pair(network, TP2, TP2)
    (tier, _), door, seen = [rank.peers for rank in second.ranks], threading.Event(), list[object]()
    progress = vars(tier)["_progress"]

    def receive(mover, name, engine, positions, tables, **_):
        seen.extend(map(list, tables))
        raise PlanError("it is only looked at")

    monkeypatch.setattr(Mover, "receive", receive)
    progress.submit(lambda _: door.wait(30))
    tables = [np.array([1, 2, 3]), [4, 5, 6]]
    tier.read(PeerQuestion("request", ("first",)), 0, range(12), tables, PeerRead(lambda: False, lambda _: None))
    tables[0][:], tables[1][:] = 9, [9, 9, 9]
    door.set()
    progress.submit(lambda _: None).result()
    assert seen == [[1, 2, 3], [4, 5, 6]]
    first.close()
    second.close()
