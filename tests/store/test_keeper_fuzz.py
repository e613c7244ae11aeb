"""A keeper's state machine under whatever its decoder lets through: nothing raises, and its journals stay readable."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from keeper_world import KEY, OBJECT_BYTES, PAGES, PART, SLAB_BYTES

from kvmover.store.keeper.journal import decode_entries
from kvmover.store.keeper.keeper_machine import step
from kvmover.store.keeper.messages import SPEAKS, Attach, Request, decode_request, encode
from kvmover.store.keeper.state import (
    AppendEntry,
    KeeperEvent,
    KeeperState,
    SessionHeard,
    SessionOpened,
    SessionOver,
    SlabFailed,
    SlabProved,
)
from kvmover.store.record import DIGEST_BYTES, encode_part
from tests.drawn_values import damaged, drawn
from tests.proofs import searched

SPACES = [bytes([number]) * 32 for number in range(2)]
PLACES = [0, OBJECT_BYTES, 100]


def odd_parts() -> list[bytes]:
    """A part that is sound, more often than not, and each that has another word in one place."""
    sound = encode_part(KEY)
    words = [word.to_bytes(8, "little") for word in (0, 1, (1 << 63) - 1, (1 << 64) - 1)]
    odd = [sound[:at] + word + sound[at + 8 :] for at in range(0, len(sound), 8) for word in words]
    return [sound] * 2 * len(odd) + odd


#: Values that a client has which keeps to the protocol.
USUAL = {
    "speaks": [SPEAKS],
    "namespace": SPACES,
    "generation": [0, 1, 1, 2],
    "slab": [*range(1, 6)],
    "keep": [*range(1, 6)],
    "slabs": [*range(1, 6)],
    "slab_bytes": [SLAB_BYTES],
    "quota_bytes": [3 * SLAB_BYTES],
    "offset": PLACES,
    "nbytes": [PART.nbytes],
    "page": PAGES,
    "pages": PAGES,
    "part": odd_parts(),
    "digests": [bytes(PART.box.cells * DIGEST_BYTES)],
    "records": [48, 176],
    "before": [1005, 1100],
}


class Heckled:
    """A keeper of four clients, one of whom says anything that can be decoded, and often something that fits."""

    def __init__(self, seed: int) -> None:
        self.dice, self.now = Random(seed), 1000
        self.state = KeeperState(3 * SLAB_BYTES, SLAB_BYTES)
        self.journals = Counter[bytes]()
        self.sessions = 0
        for _ in range(4):
            self.open()

    def open(self) -> None:
        self.sessions += 1
        self.step(SessionOpened(self.sessions))
        attach = Attach(SPEAKS, self.dice.choice(SPACES), b"{}", *self.dice.choice([("", 0), ("a", 1), ("a", 2)]))
        self.step(SessionHeard(self.sessions, attach))

    def request(self) -> Request | None:
        kind = self.dice.choice(Request.__args__)
        packet = encode(drawn(kind, self.dice, ["", "a", "x" * 128], USUAL))
        return decode_request(damaged(packet, self.dice) if self.dice.random() < 0.2 else packet)

    def event(self) -> KeeperEvent:
        dice, session = self.dice, self.dice.choice([*self.state.sessions])
        sealed = [slab for slab in self.state.slabs.values() if slab.writer is None] if dice.random() < 0.1 else []
        if sealed:
            return SlabProved(sealed[0].number, frozenset(dice.sample(PLACES, dice.randrange(3))))
        match dice.randrange(30):
            case 0 if len(self.state.sessions) > 2:
                return SessionOver(session)
            case 1:
                return SlabFailed(dice.randrange(8))
            case _:
                return SessionHeard(session, self.request())

    def step(self, event: KeeperEvent) -> None:
        for action in step(self.state, event, self.now):
            if isinstance(action, AppendEntry):
                place = self.state.namespaces[action.namespace].base + self.journals[action.namespace]
                assert [entry.end for entry in decode_entries(action.entry, place)] == [place + len(action.entry)]
                self.journals[action.namespace] += len(action.entry)
        self.state.check()
        for namespace, kept in self.state.namespaces.items():
            assert kept.end - kept.base == self.journals[namespace], "the journal is not what its keeper believes"


@searched(few=25, many=1500, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_nothing_that_is_decoded_leaves_what_a_keeper_knows_in_pieces(seed: int) -> None:
    heckled = Heckled(seed)
    for _ in range(40):
        heckled.now += heckled.dice.choice([0, 0, 1, 40])
        if heckled.dice.random() < 0.05:
            heckled.open()
        heckled.step(heckled.event())
