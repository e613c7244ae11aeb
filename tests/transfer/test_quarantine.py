"""Quarantine: memory that a peer may still write is given back when it is known that it will not, and not before."""

from __future__ import annotations

import math

import pytest

from kvmover.transfer.destination.quarantine import ASK_S, Isolated, Key, Quarantine
from kvmover.transfer.result import Transfer

UNTIL = 60.0
SEAT = ("prefill", 3)
KEY: Key = ("prefill3.1", "request", 7)


def holding(ward: Isolated | None = None) -> Quarantine:
    limbo = Quarantine()
    limbo.hold(KEY, ward or ward_of(0, 256))
    return limbo


def ward_of(*offsets: int, reads: set[int] | None = None, transfer: Transfer | None = None) -> Isolated:
    return Isolated("enough", SEAT, math.inf if reads else UNTIL, list(offsets), reads or set(), transfer)


def asked(limbo: Quarantine, now: float) -> list[Key]:
    return limbo.poll(now)[0]


def freed(limbo: Quarantine, now: float) -> list[int]:
    return limbo.poll(now)[1]


def held_transfer() -> Transfer:
    transfer = Transfer("request", 0.0)
    transfer.held = True
    return transfer


def test_what_a_peer_may_write_is_kept_until_nothing_of_it_can_land():
    limbo = holding()
    assert freed(limbo, UNTIL - 0.1) == []
    assert freed(limbo, UNTIL) == [0, 256]
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
    limbo = holding(Isolated("enough", SEAT, offsets=[0, 256], lives=lambda: alive[0]))
    assert freed(limbo, 100 * UNTIL) == []
    assert limbo.next_due() == 100 * UNTIL + ASK_S
    alive.clear()
    alive.append(False)
    assert freed(limbo, 100 * UNTIL + ASK_S) == [0, 256]


def test_peers_are_asked_now_and_then_until_nothing_of_them_can_land():
    limbo = holding()
    limbo.hold(("prefill4.1", "request", 7), Isolated("enough", ("prefill", 4), 10.5))
    assert asked(limbo, 10.0) == [KEY, ("prefill4.1", "request", 7)]
    assert asked(limbo, 10.0 + ASK_S / 2) == []
    assert asked(limbo, 10.0 + ASK_S) == [KEY]
    assert limbo.reason(KEY) == "enough"


def test_reads_of_our_own_end_with_each_of_them_and_no_word_of_the_peer():
    limbo = holding(ward_of(0, 256, reads={2, 5}))
    assert limbo.drained(KEY) == []
    assert limbo.poll(1e9) == ([], [])
    assert limbo.settled(KEY, 2) == []
    assert limbo.settled(KEY, 2) == []
    assert limbo.settled(KEY, 3) == []
    assert limbo.settled(KEY, 5) == [0, 256]
    assert limbo.settled(KEY, 5) == []


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
        limbo.hold(key, Isolated("enough", ("prefill", n), UNTIL, transfer=transfer))
    limbo.drained(keys[1])
    assert transfer.held
    limbo.drained(keys[0])
    assert not transfer.held


@pytest.mark.parametrize("how", ["drained", "settled", "over", "closed"])
def test_held_pages_come_back_however_the_ward_ends(how: str):
    transfer = held_transfer()
    limbo = holding(ward_of(reads={0} if how == "settled" else None, transfer=transfer))
    if how == "drained":
        limbo.drained(KEY)
    elif how == "settled":
        limbo.settled(KEY, 0)
    elif how == "over":
        limbo.poll(UNTIL)
    else:
        limbo.clear()
    assert not transfer.held
    assert len(limbo) == 0
