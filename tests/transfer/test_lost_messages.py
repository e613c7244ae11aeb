"""Both state machines against a bad wire: a message that is lost, late or there twice costs time, never a request."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from protocol_joined import PATIENCE, Fate, Joined, on_time

from kvmover.transfer.destination.destination_machine import Source
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source import source_machine as sending
from tests.proofs import searched

#: Three sources of unequal size, one with a payload and no chunk.
WAYS = {
    f"{verb}-{'direct' if direct else 'packed'}": {
        "a": Source(5, direct, verb),
        "b": Source(2, direct, verb, aux=True),
        "c": Source(0, direct, verb, aux=True),
    }
    for verb in Verb
    for direct in (False, True)
}
ways = pytest.mark.parametrize("sources", WAYS.values(), ids=WAYS)

#: A message that is lost is asked for after `resend_s`, and its answer may be lost once more.
SOON_S = 4.0


def losing(number: int) -> Fate:
    """The wire without its `number`-th message."""
    numbers = count()
    return lambda *message: [] if next(numbers) == number else on_time(*message)


def assert_landed(joined: Joined) -> None:
    assert joined.finish is not None
    assert joined.finish.reason is None
    assert joined.whole()
    assert all(joined.aux[peer] == source.aux for peer, source in joined.state.sources.items())
    assert all(end.finish == sending.EndSend(None) for end in joined.ends.values())
    assert_clean(joined)


def assert_clean(joined: Joined) -> None:
    """Everybody has ended, and every region and every staged chunk is back."""
    assert not joined.lost
    assert (joined.reserved, joined.arena.reserved_bytes) == ({}, 0)
    for end in joined.ends.values():
        assert not end.staging
        assert end.finish is None or not end.finish.quarantined


@ways
@pytest.mark.parametrize("digests", [False, True], ids=["plain", "digests"])
def test_without_losses_nothing_is_said_twice(sources: dict[str, Source], digests: bool):
    joined = Joined(sources, digests=digests).run()
    assert_landed(joined)
    chunks = 7
    pulled, direct = sources["a"].verb is Verb.PULL, sources["a"].direct
    expected = Counter({wire.Want: 3, wire.Aux: 2, wire.Done: 3})
    expected += Counter() if direct else Counter({wire.Offered: 4, wire.Granted: chunks})
    expected += Counter({wire.Staged: chunks, wire.Taken: chunks} if pulled else {wire.Chunk: chunks})
    expected[wire.Kept] = 3 if pulled else 1  # a source that had nothing to give answers too
    assert joined.said == expected


@ways
@pytest.mark.parametrize("digests", [False, True], ids=["plain", "digests"])
def test_any_one_message_may_be_lost(sources: dict[str, Source], digests: bool):
    spoil = frozenset({("a", 1, 0)}) if digests else frozenset[tuple[str, int, int]]()
    whole = Joined(sources, digests=digests, spoil=spoil).run().log
    lost = set[type]()
    for number in range(len(whole)):
        joined = Joined(sources, fate=losing(number), digests=digests, spoil=spoil).run()
        assert_landed(joined)
        assert joined.now < SOON_S, f"without message {number}, {joined.log[number]}"
        assert joined.mismatches == len(spoil)
        lost.add(type(joined.log[number]))
    pulled, direct = sources["a"].verb is Verb.PULL, sources["a"].direct
    expected = {wire.Want, wire.Aux, wire.Done, wire.Kept} | ({wire.Staged, wire.Taken} if pulled else {wire.Chunk})
    if digests or not direct:  # a chunk that goes straight is asked for when it has to come again
        expected |= {wire.Granted} if direct and pulled else {wire.Offered, wire.Granted}
    assert lost == expected


@ways
@pytest.mark.parametrize("who", ["d", "a"])
@pytest.mark.parametrize("after", [0.005, 0.05, 0.525])
def test_any_one_message_may_be_lost_of_an_attempt_that_fails(sources: dict[str, Source], who: str, after: float):
    pulled = sources["a"].verb is Verb.PULL

    def failing(fate: Fate) -> Joined:
        joined = Joined(sources, fate=fate)
        if who == "d":
            joined.cancel(after, "enough")
        else:
            joined.refuse("a", max(after, 0.02), "enough")
        return joined.run()

    for number in range(len(failing(on_time).log)):
        joined = failing(losing(number))
        assert joined.finish is not None, f"without message {number}, {joined.log[number]}"
        assert not joined.finish.quarantined
        landed = who == "a" and joined.finish.reason is None  # before it heard that a source had failed
        assert joined.whole() if landed else joined.finish.reason == "enough"
        told = {end.finish.reason for end in joined.ends.values() if end.finish}
        assert told <= ({"enough", None} if landed or pulled else {"enough"})  # a reader may have confirmed before
        assert_clean(joined)
        assert joined.now < SOON_S, f"without message {number}, {joined.log[number]}"


@ways
def test_a_source_that_talks_does_not_keep_a_silent_one_from_being_asked_again(sources: dict[str, Source]):
    """`a` takes long, one message after the other; what `b` said first is lost meanwhile."""
    lost = iter([True])

    def fate(source: str, target: str, message: wire.AnyMessage) -> list[float]:
        if source == "b" and next(lost, False):
            return []
        return [0.3] if "a" in (source, target) else on_time(source, target, message)

    sources = {**sources, "a": replace(sources["a"], chunks=40)}
    joined = Joined(sources, slots=6, fate=fate)
    joined.run(until=3.0)
    assert {chunk for peer, chunk in joined.pages if peer == "b"} == {0, 1}
    assert_landed(joined.run())


@searched(15, 200)
@example(
    {"a": Source(5, True), "b": Source(1, False, Verb.PULL), "c": Source(5, False, Verb.PUSH, True)},
    700109960,
    1,
    1,
    0.3,
    False,
)
@given(
    sources=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(Source, st.integers(0, 6), st.booleans(), st.sampled_from(Verb), st.booleans()),
        min_size=1,
    ),
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 4),
    staging=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.1, 0.3]),
    digests=st.booleans(),
)
def test_whatever_is_lost_late_or_doubled_the_request_lands(
    sources: dict[str, Source], seed: int, slots: int, staging: int, share: float, digests: bool
):
    chance = random.Random(seed)

    def fate(source: str, target: str, message: wire.AnyMessage) -> list[float]:
        copies = 0 if chance.random() < share else 2 if chance.random() < share else 1
        return [chance.uniform(0.001, 0.4) for _ in range(copies)]

    verbs = {source.verb for source in sources.values()}
    if len(verbs) > 1:  # one request has one verb
        sources = {peer: replace(source, verb=Verb.PULL) for peer, source in sources.items()}
    joined = Joined(sources, slots, staging, fate, digests)
    joined.run(until=PATIENCE.deadline_s if share < 0.3 else PATIENCE.deadline_s + PATIENCE.drain_s + PATIENCE.resend_s)
    assert joined.finish is not None
    if joined.finish.reason is None:
        assert joined.whole()
        assert all(joined.aux[peer] == source.aux for peer, source in sources.items())
    assert joined.finish.reason is None or share == 0.3, "so many are lost that the deadline may come first"
