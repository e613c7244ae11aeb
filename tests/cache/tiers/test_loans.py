"""Inventory and loans, by hand and by random histories: what is lent is on the host, and no engine has it all."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmover.cache.peers import HostInventory, Loans
from kvmover.errors import TierError


def name(page: int) -> bytes:
    return hashlib.sha256(bytes([page])).digest()


def names(*pages: int) -> bytes:
    return b"".join(map(name, pages))


@pytest.fixture
def inventory() -> HostInventory:
    found = HostInventory()
    found.add([name(page) for page in range(8)], range(10, 18))
    return found


def test_what_is_asked_for_again_has_the_answer_that_it_had(inventory: HostInventory) -> None:
    loans = Loans()
    pages, loan = loans.asked("a", "r", 2, names(2, 3, 9), inventory)
    assert loan is not None
    assert (pages, loan.pages, loan.ids) == (4, 4, (12, 13))
    assert loans.asked("a", "r", 2, names(2, 3, 9), inventory) == (4, None)
    assert loans.asked("a", "r", 1, names(2, 3, 9), inventory) == (0, None)
    assert loans.asked("b", "r", 2, names(2, 3, 9), inventory) == (0, None)
    assert loans.lends("a", "r")
    assert not loans.lends("b", "r")


def test_a_page_is_recalled_from_all_who_have_it_and_from_nobody_else(inventory: HostInventory) -> None:
    loans = Loans()
    loans.asked("a", "r", 0, names(0, 1), inventory)
    loans.asked("b", "s", 1, names(1, 2), inventory)
    loans.asked("b", "t", 3, names(3), inventory)
    assert loans.recalled([11]) == {"r", "s"}
    assert loans.recalled([99]) == set()
    loans.over("r")
    loans.over("r")
    assert loans.recalled([10, 11]) == {"s"}
    loans.check()


def test_an_engine_that_asks_for_everything_leaves_as_much_for_the_others(inventory: HostInventory) -> None:
    loans = Loans(most=16)
    for number in range(100):
        loans.asked("greedy", f"g{number}", 0, names(0), inventory)
    assert len(loans) == 8
    assert loans.asked("modest", "m", 0, names(0), inventory)[0] == 1
    for number in range(100):
        loans.asked("modest", f"m{number}", 0, names(0), inventory)
    assert 8 < len(loans) <= 16
    loans.check()


def test_what_is_not_held_is_no_loan(inventory: HostInventory) -> None:
    loans = Loans()
    assert loans.asked("a", "r", 0, names(9, 0), inventory) == (0, None)
    assert loans.asked("a", "r", 0, b"\0" * 31, inventory) == (0, None)
    assert len(loans) == 0
    with pytest.raises(TierError, match="at least 1"):
        Loans(most=0)


def test_a_page_that_is_there_twice_is_lent_as_the_first() -> None:
    inventory = HostInventory()
    inventory.add([name(1)], [5])
    inventory.add([name(1)], [6])
    inventory.drop([6])
    assert inventory.leading(names(1)) == [5]
    inventory.drop([5])
    assert inventory.leading(names(1)) == []
    inventory.check()


class Histories(RuleBasedStateMachine):
    """Pages come and go, engines ask: whatever is lent is where the lender says."""

    def __init__(self) -> None:
        super().__init__()
        self.inventory, self.loans = HostInventory(), Loans(most=6)
        self.where: dict[int, int] = {}
        self.count = 0

    @rule(pages=st.lists(st.integers(0, 9), unique=True), first=st.integers(0, 90))
    def come(self, pages: list[int], first: int) -> None:
        fresh = [page for page in pages if page not in self.where and first + page not in self.where.values()]
        self.inventory.add([name(page) for page in fresh], [first + page for page in fresh])
        self.where.update({page: first + page for page in fresh})

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.where)))
        ids = [self.where.pop(page)]
        self.inventory.drop(ids)
        for request in self.loans.recalled(ids):
            self.loans.over(request)
        assert not self.loans.recalled(ids)

    @rule(engine=st.sampled_from("abc"), first=st.integers(0, 9))
    def ask(self, engine: str, first: int) -> None:
        self.count += 1
        pages, loan = self.loans.asked(engine, str(self.count), first, names(*range(first, 10)), self.inventory)
        if loan is not None:
            assert loan.ids == tuple(self.where[page] for page in range(first, pages))
            assert pages == 10 or pages not in self.where
        else:
            assert pages == 0

    @rule(number=st.integers(0, 40))
    def end(self, number: int) -> None:
        self.loans.over(str(number))

    @invariant()
    def holds(self) -> None:
        self.inventory.check()
        self.loans.check()
        assert len(self.inventory) == len(self.where)


TestHistories = Histories.TestCase
