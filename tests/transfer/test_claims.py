"""A page is written by one receive of a rank at a time: by whom, and until when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mover_fleets import CONFIG, Bench, Pair, truth_of
from mover_network import FaultyNetwork

from kvmover.errors import PlanError
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer import Gate, Mover, Transfer
from kvmover.transfer.destination.claims import PageClaims


def claimed(mover: Mover) -> int:
    """Pages that receives of a mover have now."""
    return sum(int(taken.sum()) for taken in mover._destination.claims._taken)


def receive(pair: Pair, name: str, tables: list[np.ndarray] | None = None, first: int = 0) -> Transfer:
    return pair.dst.movers[0].receive(
        name, "prefill", range(first, pair.tokens), pair.dst_tables[0] if tables is None else tables
    )


def test_a_page_of_an_open_receive_is_refused_to_another_which_asks_for_nothing():
    pair = Pair.of()
    (mover,), (table,) = pair.dst.movers, pair.dst_tables[0]
    first = receive(pair, "request")
    others = np.setdiff1d(np.arange(64), table)[: len(table)]
    said = f"page id {table[7]} of attention is one of request, which is being received: a page is written by one"
    with pytest.raises(PlanError, match=said):
        receive(pair, "other", [np.concatenate([others[:-1], table[7:8]])])
    grown = mover.receive("other", "prefill", range(pair.tokens), None)
    with pytest.raises(PlanError, match=said):
        mover.allocated(grown, [np.append(others[:3], table[7])])
    mover.allocated(grown, [others])
    assert claimed(mover) == 2 * len(table)
    with pytest.raises(PlanError, match=f"page id {others[2]} of attention is one of other"):
        mover.receive("third", "prefill", range(4), [others[2:3]])
    pair.bench.ended([first, grown, *pair.send(), *pair.send("other")])
    assert (claimed(mover), len(mover._destination.claims)) == (0, 0)
    pair.dst.assert_holds(pair.dst.landed(pair.dst.landed(pair.before, [[others]], pair.truth), [[table]], pair.truth))
    pair.bench.ended([receive(pair, "third"), *pair.send("third")])


def test_a_receive_that_is_refused_claims_nothing():
    pair = Pair.of()
    (mover,), (table,) = pair.dst.movers, pair.dst_tables[0]
    receive(pair, "request", [table[:25]])
    for wrong in ([table[::-1][:3]], [np.append(np.setdiff1d(np.arange(64), table)[:24], 64)]):
        with pytest.raises(PlanError):
            receive(pair, "other", wrong)
    with pytest.raises(PlanError, match="already being received"):
        receive(pair, "request", [np.setdiff1d(np.arange(64), table)[:25]])
    assert claimed(mover) == 25


def test_pages_before_what_is_wanted_are_nobodys():
    """A prefix lies in pages of several requests, and tables are filled up with any page before what is fetched."""
    pair = Pair.of()
    (table,) = pair.dst_tables[0]
    others = np.setdiff1d(np.arange(64), table)
    receive(pair, "request")
    second = receive(pair, "other", [np.concatenate([table[:2], others[:23]])], first=8)
    nothing = pair.dst.movers[0].receive("released", "prefill", range(100, 100), [np.zeros(25, np.int64)])
    pair.bench.ended([second, nothing, *pair.send("other"), *pair.send("released")])
    assert second.landed()


@pytest.mark.parametrize("ends", ["landed", "aborted", "refused"])
def test_pages_are_the_engines_again_when_a_receive_has_ended(ends: str):
    pair = Pair.of()
    asked = receive(pair, "request")
    if ends == "landed":
        pair.send()
    elif ends == "aborted":
        pair.dst.movers[0].abort(asked, "enough")
    else:
        pair.src.movers[0].refuse("request", "not here")
    pair.bench.ended([asked])
    assert claimed(pair.dst.movers[0]) == 0
    again = receive(pair, "again")
    pair.bench.ended([again, *pair.send("again")])
    pair.assert_landed()


def test_pages_of_a_failed_receive_stay_its_own_while_they_are_held():
    """A direct write that never ends may still land in them, whoever asks for them next."""
    network = FaultyNetwork()
    pair = Pair.of(config=replace(CONFIG, drain_s=0.05, route=Route.DIRECT), network=network)
    (mover,), (table,) = pair.dst.movers, pair.dst_tables[0]
    network.hold()
    asked, _ = receive(pair, "request"), pair.send()
    pair.bench.turn()
    mover.abort(asked, "enough")
    pair.bench.settle(lambda: asked.ended)
    assert asked.quarantined
    with pytest.raises(PlanError, match=f"page id {table[0]} of attention is one of request, which is over, and may"):
        receive(pair, "other")
    network.deliver()
    pair.bench.settle(lambda: not asked.quarantined)
    other = receive(pair, "other")
    pair.bench.ended([other, *pair.send("other")])
    pair.assert_landed()


def test_a_transfer_whose_pages_are_held_is_kept_once_however_often_they_are_looked_at():
    pair = Pair.of()
    claims = PageClaims([pool.spec for pool in pair.dst.pools[0]])
    held = [Transfer("one", 0.0), Transfer("two", 0.0)]
    for number, transfer in enumerate(held):
        transfer.quarantined = True
        claims.take(transfer, (np.array([number]),))
        claims.give(transfer)
    for _ in range(3):
        claims.sweep()
    assert claims._quarantined == held
    held[0].quarantined = False
    claims.sweep()
    assert claims._quarantined == held[1:]
    assert [len(claims), int(claims._taken[0].sum())] == [1, 1]


def test_a_receive_may_name_its_own_page_again_and_no_other_may():
    pair = Pair.of()
    claims = PageClaims([pool.spec for pool in pair.dst.pools[0]])
    mine, other = Transfer("mine", 0.0), Transfer("other", 0.0)
    claims.take(mine, (np.array([3]),))
    claims.take(mine, (np.array([3, 4]),))
    for page in (3, 4):
        with pytest.raises(PlanError, match=f"page id {page} of attention is one of mine, which is being received"):
            claims.take(other, (np.array([5, page]),))
    claims.take(other, (np.array([5]),))
    claims.give(mine)
    assert [len(claims), int(claims._taken[0].sum())] == [1, 1]


def test_windows_states_and_parts_claim_what_lands_and_no_more():
    """The last page of a window may be its first, and a rank of three claims its own part of a request."""
    components = (
        Component.attention(2, 2, 8, "float32"),
        Component.sliding(2, 2, 8, 8, "float32"),
        Component.state("state", 2, 2, 8, "float32", states=2),
    )
    bench, tokens = Bench(components), 30
    source = bench.engine("prefill", Fleet(page_tokens=4))
    target = bench.engine("decode", Fleet(cp=3, page_tokens=4))
    target.connect(source)
    bench.turn()
    tables, wanted, truth = source.tables(tokens), target.tables(tokens, 1), truth_of(components, tokens)
    source.fill(tables, truth)
    before = target.snapshot()
    landed = target.receive("request", "prefill", range(tokens), wanted)
    assert [claimed(mover) for mover in target.movers] == [6, 6, 5]
    bench.ended([*landed, *source.send("request", tables)])
    target.assert_holds(target.landed(before, wanted, truth))
    assert [claimed(mover) for mover in target.movers] == [0, 0, 0]


def test_a_page_of_a_receive_may_be_sent_on_meanwhile():
    """A page that is read has no claim: an engine sends what it has while more of it comes."""
    pair = Pair.of()
    receive(pair, "request")
    assert pair.dst.movers[0].send("onward", pair.dst_tables[0], gates=[Gate(None, tokens=4)]).result is None
