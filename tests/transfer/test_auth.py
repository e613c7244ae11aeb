"""Seals: what a holder of the key wrote is read once, by whom it was written to, whatever a network does with it."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError, PeerRefused, ProtocolError
from kvmover.transfer import core as assembly
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import (
    WINDOW,
    Key,
    Keys,
    MessageAuth,
    NoAuth,
    Refusal,
    Unverified,
    Window,
    authentication,
)
from tests.sim.scenario import PROFILES
from tests.sim.world import World

SECRET = b"a secret of the tests"
KEYS = Keys(Key(SECRET))
PING = wire.encode(wire.Ping())


def pair(ours: Keys = KEYS, theirs: Keys = KEYS) -> tuple[MessageAuth, MessageAuth]:
    return MessageAuth(ours, "p.1"), MessageAuth(theirs, "d.1")


def refused(seal: MessageAuth, peer: str, sealed: bytes) -> Refusal:
    with pytest.raises(Unverified) as error:
        seal.verify(peer, sealed)
    return error.value.refusal


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_what_was_sealed_is_opened_and_no_two_are_alike(messages: list[bytes]):
    here, there = pair()
    sealed = [here.sign("d.1", message) for message in messages]
    assert [there.verify("p.1", each) for each in sealed] == messages
    assert len(set(sealed)) == len(messages)
    assert all(len(each) <= len(message) + wire.SEAL_BYTES for each, message in zip(sealed, messages, strict=True))


def test_a_message_is_read_once():
    here, there = pair()
    sealed = here.sign("d.1", PING)
    assert there.verify("p.1", sealed) == PING
    assert refused(there, "p.1", sealed) is Refusal.REPEATED


def test_a_message_is_read_by_whom_it_was_written_to_and_as_from_whom_it_was_written():
    here, there = pair()
    sealed = here.sign("d.1", PING)
    assert refused(MessageAuth(KEYS, "d.2"), "p.1", sealed) is Refusal.FORGED
    assert refused(there, "p.2", sealed) is Refusal.FORGED
    assert refused(here, "d.1", sealed) is Refusal.FORGED, "a message sent back to who wrote it"
    assert there.verify("p.1", sealed) == PING


def test_names_that_run_into_each_other_are_told_apart():
    sealed = MessageAuth(KEYS, "ab").sign("c", PING)
    assert refused(MessageAuth(KEYS, "bc"), "a", sealed) is Refusal.FORGED


@given(st.data())
def test_no_bit_of_a_message_can_be_changed(data: st.DataObject):
    here, there = pair()
    sealed = bytearray(here.sign("d.1", wire.encode(wire.Done("request", 7))))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert refused(there, "p.1", bytes(sealed)) in (Refusal.FORGED, Refusal.UNSEALED)
    sealed[bit // 8] ^= 1 << bit % 8
    assert there.verify("p.1", bytes(sealed)) == wire.encode(wire.Done("request", 7))


@given(st.binary(max_size=100) | st.binary(max_size=100).map(lambda rest: wire.SEALED + rest))
def test_no_bytes_whatever_are_opened_without_the_key(junk: bytes):
    assert refused(pair()[1], "p.1", junk) in (Refusal.FORGED, Refusal.UNSEALED)


def test_every_shorter_message_is_refused():
    here, there = pair()
    sealed = here.sign("d.1", PING)
    assert all(refused(there, "p.1", sealed[:length]) for length in range(len(sealed)))


def test_a_message_too_short_for_a_seal_has_none_and_an_empty_one_may_be_sealed():
    here, there = pair()
    sealed = here.sign("d.1", b"")
    for length in range(len(sealed)):
        assert refused(there, "p.1", sealed[:length]) is Refusal.UNSEALED
    assert there.verify("p.1", sealed) == b""


def test_a_window_takes_any_number_of_64_bits_after_any_other():
    window = Window()
    for number in (1, WINDOW, (1 << 64) - 1):
        assert window.look(number) is None
        window.mark(number)
        assert window.look(number) is Refusal.REPEATED
        assert window.seen < 1 << WINDOW
    assert window.look((1 << 64) - WINDOW) is None
    assert window.look((1 << 64) - WINDOW - 1) is Refusal.STALE


def test_a_message_without_a_seal_is_refused_where_there_is_a_key():
    assert refused(pair()[1], "p.1", PING) is Refusal.UNSEALED


def test_a_sealed_message_is_refused_by_name_where_there_is_no_key():
    here, _ = pair()
    received = NoAuth().verify("p.1", here.sign("d.1", PING))
    with pytest.raises(ProtocolError, match="a sealed message, and this side has no shared key"):
        wire.decode(received)


def test_the_largest_message_fits_a_note_with_its_seal():
    from kvmover.transport import MAX_NOTE_BYTES

    assert len(pair()[0].sign("d.1", bytes(wire.MAX_MESSAGE_BYTES))) <= MAX_NOTE_BYTES


# Windows


@given(st.lists(st.integers(0, 3 * WINDOW), max_size=60), st.integers(0, WINDOW))
def test_a_window_says_what_a_set_of_all_numbers_would(numbers: list[int], jump: int):
    window, seen = Window(), set[int]()
    for number in [*numbers, *(number + jump for number in numbers)]:
        highest = max(seen, default=-1)
        expected = Refusal.REPEATED if number in seen else None
        if highest - number >= WINDOW:
            expected = Refusal.STALE
        assert window.look(number) is expected
        if expected is None:
            window.mark(number)
            seen.add(number)
        assert window.seen.bit_length() <= WINDOW


def test_messages_may_overtake_each_other_by_a_window_and_no_further():
    here, there = pair()
    sealed = [here.sign("d.1", PING) for _ in range(WINDOW + 1)]
    assert there.verify("p.1", sealed[-1]) == PING
    assert refused(there, "p.1", sealed[0]) is Refusal.STALE
    assert there.verify("p.1", sealed[1]) == PING
    assert refused(there, "p.1", sealed[1]) is Refusal.REPEATED


def test_a_forged_number_does_not_move_the_window():
    here, there = pair()
    first, second = (here.sign("d.1", PING) for _ in range(2))
    far = wire.SEALED + (1 << 60).to_bytes(8, "big") + second[12:]
    assert refused(there, "p.1", far) is Refusal.FORGED
    assert there.verify("p.1", first) == PING


def test_every_peer_has_numbers_of_its_own():
    here, there = pair()
    for _ in range(WINDOW):
        here.sign("d.2", PING)
    late, now = here.sign("d.1", PING), here.sign("d.1", PING)
    assert [there.verify("p.1", each) for each in (now, late)] == [PING, PING]


def test_what_others_say_does_not_make_a_message_new_again():
    _, there = pair()
    sealed = {name: MessageAuth(KEYS, name).sign("d.1", PING) for name in ("p.1", "p.2")}
    assert [there.verify(name, each) for name, each in sealed.items()] == [PING, PING]
    assert [refused(there, name, each) for name, each in sealed.items()] == [Refusal.REPEATED] * 2


# Keys


def test_keys_are_changed_under_traffic():
    """Every side accepts the new one; then each seals with it, at its own time; then the old one is forgotten."""
    old, new = Key(b"the key of last year"), Key(b"the key of this year")
    steps = [Keys(old), Keys(old, (new,)), Keys(new, (old,)), Keys(new)]
    here, there = pair(steps[0], steps[0])
    for before, after in pairwise(steps):
        for ours, theirs in ((before, before), (before, after), (after, after)):
            here.keys, there.keys = ours, theirs
            assert there.verify("p.1", here.sign("d.1", PING)) == PING
            assert here.verify("d.1", there.sign("p.1", PING)) == PING
    here.keys = Keys(old)
    assert refused(there, "p.1", here.sign("d.1", PING)) is Refusal.FORGED


def test_a_key_is_in_no_text_and_in_no_error():
    for text in (repr(KEYS), str(KEYS), repr(KEYS.seals), f"{pair()[0]}"):
        assert "secret" not in text
    with pytest.raises(LayoutError, match=r"^a key of 6 bytes; it must have at least 16$"):
        Key(b"secret")
    with pytest.raises(Unverified) as error:
        pair()[0].verify("p", b"x")
    assert "secret" not in str(error.value)


def test_keys_go_to_worker_processes():
    copy = pickle.loads(pickle.dumps(KEYS))
    assert copy == KEYS != Keys(Key(SECRET + b"!"))
    assert copy.wrote(KEYS.write(b"x"), b"x")


# Cards


def test_a_card_is_opened_by_every_holder_of_the_key_as_often_as_they_like():
    sealed = pair()[0].sign_card(b"card")
    assert [seal.verify_card(sealed) for seal in (*pair(), *pair())] == [b"card"] * 4


def test_a_card_that_is_not_sealed_with_a_key_of_ours_is_refused():
    seal, stranger = pair(theirs=Keys(Key(b"a key of somebody else")))
    for card, said in (
        (b"card", "has no seal, and this side has a shared key"),
        (stranger.sign_card(b"card"), "not of a key of ours"),
        (seal.sign_card(b"card") + b"!", "not of a key of ours"),
        (seal.sign("p.1", b"card"), "not of a key of ours"),
    ):
        with pytest.raises(PeerRefused, match=said):
            seal.verify_card(card)
    with pytest.raises(PeerRefused, match="is sealed, and this side has no shared key"):
        NoAuth().verify_card(seal.sign_card(b"card"))


def test_a_card_is_no_message():
    here, there = pair()
    assert refused(there, "p.1", here.sign_card(PING)) is Refusal.FORGED


def test_without_keys_everything_goes_as_it_is():
    seal = authentication(None, "p.1")
    assert (seal.sign("d.1", PING), seal.verify("d.1", PING), seal.sign_card(b"c"), seal.verify_card(b"c")) == (
        PING, PING, b"c", b"c",
    )  # fmt: skip


#: Where the message of a sealed note begins.
INSIDE = len(wire.SEALED) + 8 + 32


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mover has the key. The simulator, which looks into notes on their way, looks through their seals."""
    decode, split = wire.decode, wire.split

    def inside(payload: bytes) -> bytes:
        return payload[INSIDE:] if payload.startswith(wire.SEALED) else payload

    monkeypatch.setattr(wire, "decode", lambda payload: decode(inside(payload)))
    monkeypatch.setattr(wire, "split", lambda payload: split(inside(payload)))
    monkeypatch.setattr(assembly, "authentication", lambda _, name: MessageAuth(KEYS, name))


@pytest.mark.parametrize("profile", ["default", "hostile", "echoes"])
@pytest.mark.usefixtures("sealed")
def test_every_invariant_holds_and_only_repetitions_are_dropped(profile: str):
    refused: dict[str, int] = {}
    for seed in range(25):
        world = World(seed, profile).run()
        for seat in world.scene.seats.values():
            for reason, count in seat.mover.meter.unopened.items():
                refused[reason] = refused.get(reason, 0) + count
    repeated = {Refusal.REPEATED} if PROFILES[profile].duplicates else set()
    assert set(refused) == repeated
