"""The index: hashes among millions, what stands in which order, and what a step may cost however much there is."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from kvmover.store import columns
from kvmover.store.columns import NumberColumns, PageTable
from kvmover.store.growing import GrowingNumbers


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def test_a_table_finds_what_was_put_and_not_removed_while_it_moves_to_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns, "_MOVED", 16)
    chance, table, known = random.Random(1), PageTable(1), dict[bytes, int]()
    moving = 0
    for turn in range(400):
        fresh = [key(turn * 100 + number) for number in range(chance.randrange(60))]
        rows, new = table.put_many(b"".join([*fresh, *fresh[:5], *list(known)[:5]]))
        assert rows[len(fresh) : len(fresh) + len(fresh[:5])].tolist() == rows[: len(fresh[:5])].tolist(), "twins"
        assert new.tolist() == rows[: len(fresh)].tolist()
        known.update(zip(fresh, rows.tolist(), strict=False))
        gone = chance.sample(list(known), min(len(known), chance.randrange(40)))
        table.remove_many(np.array([known.pop(page) for page in gone], np.int64))
        moving += table._small is not None
        asked = [*known, *gone]
        assert table.find_many(asked).tolist() == [*known.values(), *[-1] * len(gone)]
        assert [table.find(page) for page in asked[-70:]] == table.find_many(asked[-70:]).tolist()
        assert len(table) == len(known)
    assert moving > 5, "no step found the table between two sizes"
    assert table.rows().tolist() == sorted(known.values())
    assert table._small is None


def test_a_table_of_a_million_moves_a_few_slots_with_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = columns._Slots.put

    def put(self, rows, known) -> None:
        moved.append(len(rows))
        real(self, rows, known)

    monkeypatch.setattr(columns._Slots, "put", put)
    chance, table, batch = np.random.default_rng(2), PageTable(2), 128
    table.put_many(chance.bytes(32 * 500_000))
    moved.clear()
    while len(table) < 1_120_000:
        table.put_many(chance.bytes(32 * batch))
    assert sum(moved) > 500_000, "it never grew"
    assert max(moved) <= columns._MOVED + batch * columns._MOVED_EACH


def test_numbers_grow_and_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = GrowingNumbers("I")
    memory = numbers._memory
    for count in (10_000, 5_000_000, 20_000_000):
        numbers.view[len(numbers) - 1] = count
        last = len(numbers) - 1
        numbers.grow(count)
        assert numbers._memory is memory
        assert numbers.numbers[last] == count
        assert not numbers.numbers[last + 1 :: 4096].any()
    assert len(numbers) >= 20_000_000


def test_numbers_that_somebody_looks_at_stay_where_they_are() -> None:
    numbers = GrowingNumbers("I")
    seen = numbers.numbers
    seen[3] = 7
    numbers.grow(100_000)
    assert (seen[3], numbers.numbers[3], numbers.view[3]) == (7, 7, 7)


def test_columns_that_grow_keep_their_rows() -> None:
    columns = NumberColumns(first="i", parts="i")
    rows = columns.take(10)
    columns.column("first")[rows] = rows
    columns.give_back(rows[:3])
    more = columns.take(100_000)
    assert set(more.tolist()) & set(range(10)) == {0, 1, 2}
    assert columns.column("first")[3:10].tolist() == list(range(3, 10))
    assert columns.first[9] == 9
