"""Memory that a peer may still write is given back when its lease is over, or the peer has drained, and not before."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer.destination.quarantine import (
    ASK_S,
    CLOCK_DRIFT,
    Isolated,
    Key,
    Quarantine,
    Retransmissions,
    WriteLeases,
)
from kvmover.transfer.protocol.wire import WriteLease
from kvmover.transfer.result import Transfer

LEASE_S, LINGER_S = 5.0, 40.0
A, B = "a.1", "b.1"


def leases() -> WriteLeases:
    return WriteLeases(LEASE_S, LINGER_S)


def test_a_source_that_was_never_heard_gets_a_lease_that_is_over():
    lease = leases().renewed(A)
    assert lease.until_us == 0
    assert leases().retire(A) == 0.0


def test_the_newest_stamp_comes_back_however_late_others_are_heard():
    lent = leases()
    lent.heard(A, 7_000_000, 100.0)
    lent.heard(A, 6_000_000, 101.0)
    lent.heard(B, 9_000_000, 101.0)
    assert lent.renewed(A) == WriteLease(1, 7_000_000, 5_000_000)
    assert lent.renewed(A).until_us == 12_000_000


def test_what_was_leased_is_free_when_what_was_posted_last_has_landed():
    lent = leases()
    lent.heard(A, 1, 100.0)
    assert lent.retire(A) == LINGER_S, "nothing was leased"
    lent.renewed(A)
    lent.heard(A, 2, 103.0)  # and not leased on
    assert lent.retire(A) == 100.0 + LEASE_S * CLOCK_DRIFT + LINGER_S
    lent.renewed(A)
    assert lent.retire(A) == 103.0 + LEASE_S * CLOCK_DRIFT + LINGER_S


def test_a_renewal_after_memory_was_given_up_is_of_a_later_term():
    lent = leases()
    lent.heard(A, 1, 100.0)
    lent.heard(B, 1, 100.0)
    before, other = lent.renewed(A), lent.renewed(B)
    lent.retire(A)
    assert lent.renewed(A).term > before.term
    assert lent.renewed(B) == other, "it is no affair of others"


def test_a_source_that_was_forgotten_gets_a_later_term():
    lent = leases()
    lent.heard(A, 1, 100.0)
    before = lent.renewed(A)
    lent.expire(100.0 + LINGER_S)
    assert len(lent) == 1
    lent.expire(101.0 + LEASE_S * CLOCK_DRIFT + LINGER_S)
    assert len(lent) == 0
    assert lent.renewed(A).until_us == 0
    lent.heard(A, 2, 200.0)
    assert lent.renewed(A).term > before.term


def test_a_stamp_that_is_heard_twice_leases_nothing_longer():
    lent = leases()
    lent.heard(A, 0, 100.0)
    assert lent.renewed(A) == WriteLease(1, 0, 5_000_000)
    lent.heard(A, 7, 101.0)
    lent.heard(A, 7, 103.0)
    lent.renewed(A)
    assert lent.retire(A) == 101.0 + LEASE_S * CLOCK_DRIFT + LINGER_S
    assert lent.term == 2


def test_a_source_is_forgotten_once_neither_its_lease_nor_its_last_stamp_counts_any_more():
    lent = leases()
    lent.heard(A, 1, 100.0)
    lent.renewed(A)
    lent.heard(A, 2, 103.0)  # which may be leased on
    over = 103.0 + LEASE_S * CLOCK_DRIFT + LINGER_S
    lent.expire(over - 2.0)
    assert len(lent) == 1
    lent.expire(over - 2.0 + LEASE_S)
    assert len(lent) == 0
    exact = leases()
    exact.heard(A, 1, 100.0)
    exact.expire(100.0 + LEASE_S * CLOCK_DRIFT + LINGER_S)
    assert len(exact) == 0


def test_sources_to_forget_are_looked_for_once_in_the_time_of_a_lease():
    lent = leases()
    lent.heard(A, 1, 100.0)
    over = 100.0 + LEASE_S * CLOCK_DRIFT + LINGER_S
    lent.expire(over - 1.0)
    lent.expire(over)
    assert len(lent) == 1, "they were looked for a second ago"
    lent.expire(over - 1.0 + LEASE_S)
    assert len(lent) == 0


def test_a_lease_that_was_shortened_meanwhile_is_waited_for_as_it_was_given():
    lent = leases()
    lent.heard(A, 1, 100.0)
    lent.renewed(A)
    lent.lease_s = 1.0
    lent.renewed(A)
    assert lent.retire(A) == 100.0 + LEASE_S * CLOCK_DRIFT + LINGER_S


@given(
    st.lists(st.tuples(st.floats(0.01, 9.0), st.sampled_from(["heard", "renewed", "retired"])), max_size=30),
    st.floats(-1e6, 1e6),
    st.floats(1 / CLOCK_DRIFT, 1.0),
    st.floats(0.0, 5.0),
)
def test_whatever_the_two_clocks_show_no_grant_is_posted_once_its_memory_is_free(
    steps: list[tuple[float, str]], offset_s: float, rate: float, delay_s: float
):
    """Times are ours. The source's clock shows another time, and is up to CLOCK_DRIFT slower."""
    lent, now, terms = leases(), 1000.0, dict[int, float]()

    def shown(time: float) -> float:
        return 1e7 + offset_s + time * rate

    for wait_s, what in steps:
        now += wait_s
        if what == "heard":
            lent.heard(A, int(shown(now - delay_s) * 1e6), now)
        elif what == "renewed":
            lease = lent.renewed(A)
            terms[lease.term] = max(terms.get(lease.term, 0.0), (lease.until_us / 1e6 - 1e7 - offset_s) / rate)
        else:
            term = lent.renewed(A).term
            free = lent.retire(A) - LINGER_S
            assert terms.get(term, -1e9) <= free + 1e-3 or free == -LINGER_S


UNTIL = 60.0
SEAT = ("prefill", 3)
KEY: Key = ("prefill3.1", "request", 7)


def holding(ward: Isolated | None = None) -> Quarantine:
    limbo = Quarantine()
    limbo.hold(KEY, ward or ward_of(0, 256))
    return limbo


def ward_of(*offsets: int, reads: set[int] | None = None) -> Isolated:
    return Isolated("enough", SEAT, math.inf if reads else UNTIL, list(offsets), reads or set())


def held_transfer() -> Transfer:
    transfer = Transfer("request", 0.0)
    transfer.quarantined = True
    return transfer


def test_what_a_peer_may_write_is_kept_until_nothing_of_it_can_land():
    limbo = holding()
    assert limbo.expired(KEY, UNTIL - 0.1) == []
    assert limbo.expired(KEY, UNTIL) == [0, 256]
    assert len(limbo) == 0


def test_the_very_process_that_may_write_says_that_it_has_drained():
    limbo = holding()
    for other in [("prefill3.2", "request", 7), ("prefill3.1", "other", 7), ("prefill3.1", "request", 8)]:
        assert limbo.drained(other) == []
    assert limbo.drained(KEY) == [0, 256]
    assert limbo.drained(KEY) == []
    assert len(limbo) == 0


def test_what_a_process_of_this_host_copies_into_is_kept_while_it_lives_whatever_the_time():
    alive = [True]
    isolated = Isolated("enough", SEAT, offsets=[0, 256], lives=lambda: alive[0])
    limbo = holding(isolated)
    assert limbo.expired(KEY, 100 * UNTIL) == []
    assert isolated.due(100 * UNTIL) == 100 * UNTIL + ASK_S
    alive.clear()
    alive.append(False)
    assert limbo.expired(KEY, 100 * UNTIL + ASK_S) == [0, 256]


def test_memory_is_looked_at_in_intervals_and_when_nothing_can_land_in_it():
    assert Isolated("enough", SEAT, 10.5).due(10.0) == 10.5
    assert Isolated("enough", SEAT, 60.0).due(10.0) == 10.0 + ASK_S


def test_reads_of_our_own_end_with_each_of_them_and_no_word_of_the_peer():
    limbo = holding(ward_of(0, 256, reads={2, 5}))
    assert limbo.drained(KEY) == []
    assert limbo.expired(KEY, 1e9) == []
    assert limbo.settled(KEY, 2) == []
    assert limbo.settled(KEY, 2) == []
    assert limbo.settled(KEY, 3) == []
    assert limbo.settled(KEY, 5) == [0, 256]
    assert limbo.settled(KEY, 5) == []


def test_the_end_of_a_read_that_was_not_awaited_frees_nothing_that_a_peer_may_write():
    limbo = holding()
    assert limbo.settled(KEY, 3) == []
    assert list(limbo) == [KEY]


def test_regions_of_the_lost_are_those_that_nobody_else_may_write_and_no_read():
    limbo = holding()
    limbo.hold(("prefill4.1", "request", 7), ward_of(512))
    limbo.hold(("prefill3.1", "other", 8), ward_of(768, reads={2}))
    assert limbo.offsets(lambda peer: peer == "prefill3.1") == {0, 256}
    assert limbo.offsets(lambda peer: peer == "prefill4.1") == {512}
    assert limbo.offsets(lambda peer: False) == frozenset()


def test_an_attempt_whose_regions_were_registered_anew_is_over_unless_pages_or_reads_are_left():
    with_pages, with_reads = ward_of(512), ward_of(768, reads={2})
    limbo = holding()
    limbo.hold(("prefill4.1", "request", 7), with_pages)
    limbo.keep(with_pages, held_transfer())
    limbo.hold(("prefill5.1", "request", 7), with_reads)
    limbo.revoked([0])
    assert len(limbo) == 3
    limbo.revoked([256, 512, 768])
    assert list(limbo) == [("prefill4.1", "request", 7), ("prefill5.1", "request", 7)]
    assert [isolated.offsets for isolated in (with_pages, with_reads)] == [[], []]


def test_with_the_transport_reads_end_and_what_peers_may_write_stays():
    limbo = holding()
    limbo.hold(("prefill4.1", "request", 7), ward_of(512, reads={2, 3}))
    assert limbo.outlive() == [512]
    assert list(limbo) == [KEY]
    limbo.hold(("prefill4.1", "request", 7), ward_of(512, reads={2, 3}))
    limbo.clear()
    assert len(limbo) == 0


def test_who_is_dead_writes_no_more_and_what_is_read_from_him_may_still_land():
    limbo = holding(ward_of(0, 256, reads={2}))
    limbo.hold(("prefill3.1", "other", 8), ward_of(512))
    limbo.hold(("prefill4.1", "other", 8), Isolated("enough", ("prefill", 4), UNTIL, [768]))
    assert limbo.forget(SEAT) == [512]
    assert limbo.settled(KEY, 2) == [0, 256]
    assert len(limbo) == 1


def test_the_pages_of_a_transfer_are_held_until_the_last_of_its_peers_is_done_with_them():
    transfer, limbo = held_transfer(), Quarantine()
    keys: list[Key] = [(f"prefill{n}.1", "request", 7) for n in range(2)]
    for n, key in enumerate(keys):
        isolated = Isolated("enough", ("prefill", n), UNTIL)
        limbo.hold(key, isolated)
        limbo.keep(isolated, transfer)
    limbo.drained(keys[1])
    assert transfer.quarantined
    limbo.drained(keys[0])
    assert not transfer.quarantined
    assert not limbo._pages, "a transfer that is over is not kept"


@pytest.mark.parametrize("how", ["drained", "settled", "over", "closed"])
def test_held_pages_come_back_however_the_ward_ends(how: str):
    transfer = held_transfer()
    isolated = ward_of(reads={0} if how == "settled" else None)
    limbo = holding(isolated)
    limbo.keep(isolated, transfer)
    if how == "drained":
        limbo.drained(KEY)
    elif how == "settled":
        limbo.settled(KEY, 0)
    elif how == "over":
        limbo.expired(KEY, UNTIL)
    else:
        limbo.clear()
    assert not transfer.quarantined
    assert len(limbo) == 0


RESEND_S = 1.0
OTHER: Key = ("prefill4.1", "request", 7)


def said(*keys: Key) -> Retransmissions:
    farewells = Retransmissions()
    for key in keys:
        farewells.said(key, key[0].encode(), due=10.0, until=15.0)
    return farewells


def test_it_is_said_again_in_intervals_and_not_for_ever():
    farewells = said(KEY)
    assert farewells.due(KEY) == 10.0
    times = [now / 2 for now in range(16, 40) if farewells.again(KEY, now / 2, RESEND_S) == b"prefill3.1"]
    assert times == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert len(farewells) == 0
    assert farewells.due(KEY) == math.inf


def test_one_answer_ends_one_farewell():
    third = ("prefill3.1", "request", 8)
    farewells = said(KEY, OTHER, third)
    farewells.heard(KEY)
    farewells.heard(("nobody", "request", 7))
    assert [farewells.due(key) for key in (KEY, OTHER, third)] == [math.inf, 10.0, 10.0]
    assert farewells.again(KEY, 10.0, RESEND_S) is None


def test_a_lost_peer_is_told_nothing_more():
    farewells = said(KEY, OTHER, ("prefill3.1", "other", 8))
    farewells.lost("prefill3.1")
    assert len(farewells) == 1
    assert farewells.again(OTHER, 10.0, RESEND_S) == b"prefill4.1"


def test_a_want_is_not_said_any_more_at_its_deadline():
    farewells = Retransmissions()
    farewells.said(KEY, b"want", due=1.0, until=3.0)
    assert farewells.again(KEY, 2.0, 10.0) == b"want"
    assert farewells.due(KEY) == 3.0
    assert farewells.again(KEY, 3.0, 10.0) is None
    assert len(farewells) == 0


@pytest.mark.parametrize("kind", ["heard", "leased", "leased for longer before"])
def test_a_source_is_forgotten_when_nothing_that_it_was_leased_can_land_and_no_sooner(kind: str):
    for now, is_known in ((120.0, True), (145.04, True), (145.06, False), (1000.0, False)):
        leases = WriteLeases(5.0, 40.0)
        leases.heard(A, 7, 100.0)
        if kind != "heard":
            leases.renewed(A)
        if kind == "leased for longer before":
            leases.lease_s = 1.0
        before = leases.term
        leases.expire(now)
        assert len(leases) == is_known
        assert leases.term == before + (not is_known), "if it returns it gets a later term"
