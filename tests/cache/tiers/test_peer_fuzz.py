"""Questions and answers of peers, through their decoder: loans add up, cost no more than they lend, and asks end."""

from __future__ import annotations

from random import Random
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.peers import HostInventory, Loans
from kvmover.cache.peers.loans import MOST_PAGES
from kvmover.errors import ProtocolError
from kvmover.transfer.peers.asks import Asking, heard, ticked
from kvmover.transfer.protocol import wire
from tests.drawn_values import damaged, drawn
from tests.proofs import searched

HASHES = [bytes([number]) * wire.PAGE_HASH_BYTES for number in range(8)]
USUAL: dict[str, list[Any]] = {
    "hashes": [b"", *(b"".join(HASHES[first:]) for first in range(8)), HASHES[0] + HASHES[5], HASHES[1][:7]],
    "first": [0, 1, 2],
    "pages": [0, 1, 8],
}
Kind = TypeVar("Kind", wire.Query, wire.Holding)


def said(kind: type[Kind], dice: Random) -> Kind:
    """A message that the decoder lets through."""
    while True:
        note = wire.encode(drawn(kind, dice, ["r", "s", "x" * 256], USUAL))
        try:
            message = wire.decode(damaged(note, dice) if dice.random() < 0.2 else note)
        except ProtocolError:
            continue
        if isinstance(message, kind):
            return message


@searched(few=40, many=2000, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_loans_add_up_whoever_asks_for_what(seed: int) -> None:
    dice, inventory = Random(seed), HostInventory()
    loans = Loans(dice.choice([1, 4, 128]))
    inventory.add(HASHES, range(8))
    for _ in range(30):
        query, engine = said(wire.Query, dice), dice.choice("abc")
        if not query.hashes:
            if loans.lends(engine, query.request):
                loans.over(query.request)
        else:
            pages, loan = loans.asked(engine, query.request, query.first, query.hashes, inventory)
            assert pages <= min(query.first + len(query.hashes) // wire.PAGE_HASH_BYTES, MOST_PAGES)
            assert loan is None or loan.pages == pages
        if dice.random() < 0.2:
            lost = dice.sample(range(8), 2)
            inventory.drop(lost)
            for request in loans.recalled(lost):
                loans.over(request)
            inventory.add([HASHES[number] for number in lost], lost)
        loans.check()
        inventory.check()


@searched(few=40, many=2000, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_a_question_ends_whoever_answers_what(seed: int) -> None:
    dice, now = Random(seed), 0.0
    state = Asking(frozenset("abc"), until=5.0, again=1.0)
    for _ in range(20):
        now += dice.choice([0.0, 0.3, 1.0])
        before = state
        if dice.random() < 0.5:
            state = heard(state, dice.choice("abcx"), said(wire.Holding, dice).pages)
        else:
            state, again = ticked(state, now, 1.0)
            assert again <= before.waits
        assert state.waits <= before.waits
        assert state.offers <= frozenset("abc")
        assert state.pages is None or state.pages >= 0
    state, _ = ticked(state, 5.0, 1.0)
    assert state.over
