"""The index: hashes among millions, what stands in which order, and what a step may cost however much there is."""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np
import pytest

import kvmover.store.index as index
import kvmover.store.number_columns as columns
from kvmover.layout import Component
from kvmover.store import Namespace, PagePart
from kvmover.store.index import Index
from kvmover.store.number_columns import GrowingNumbers, NumberColumns, PageTable
from kvmover.store.retention import _slack
from kvmover.store.stored import StoredObject

KEY = PagePart.whole(Component.mla(1, 4, "uint8"), 16).key(Namespace("llama", "1", 16))


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


def objects_of(numbers: list[int], segment: str) -> list[StoredObject]:
    return [StoredObject(segment, 80 + number * 152, number * 4096, 64, key(number), KEY, 5) for number in numbers]


def test_pages_leave_the_order_of_use_alike_one_by_one_and_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, orders = random.Random(3), list[list[bytes]]()
    removed = [chance.sample(range(200), count) for count in (0, 1, 40, 150, 199, 200)]
    removed += [list(range(50)), list(range(150, 200)), list(range(20, 180)), list(range(0, 200, 2))]
    in_order = sorted(range(200), key=lambda number: (number % 7 == 0, number))  # of use, as below
    removed += [in_order[:90], in_order[40:160], in_order[110:], in_order[:40] + in_order[90:130]]
    for few in (0, 1000):
        monkeypatch.setattr(index, "_FEW", few)
        for gone in removed:
            mine = Index()
            mine.add(objects_of(list(range(200)), "a"))
            mine.use([key(number) for number in range(0, 200, 7)], 9)
            mine.remove(objects_of(gone, "a"))
            mine.use([key(number) for number in range(3, 200, 11)], 10)
            mine.add(objects_of([500, 501], "b"))
            orders.append([page for page, _ in mine.pages()])
            assert len(mine) == len(orders[-1]) == 202 - len(gone)
            assert mine.span_s == (mine.stamps_of(orders[-1][:1])[0], 5)
    assert orders[: len(removed)] == orders[len(removed) :]


def test_a_page_stays_while_one_of_its_objects_does() -> None:
    mine = Index()
    for segment in ("a", "b"):
        mine.add(objects_of(list(range(100)), segment))
    assert len(mine.placed(mine.coldest(1000, 3 * 2 * 4096, ()))) == 6
    assert mine.remove_placed(mine.placed_in("a")) == 100 * 4096
    assert len(mine) == 100
    assert [len(page.objects) for _, page in mine.pages()] == [1] * 100
    assert mine.remove_placed(mine.placed(mine.coldest(1000, 3 * 4096, ()))) == 3 * 4096
    assert [page for page, _ in mine.pages()] == [key(number) for number in range(3, 100)]
    mine.drop("b")
    assert (len(mine), mine.held_bytes, mine.empty("b")) == (0, 0, True)


def test_an_object_takes_150_bytes_and_nothing_of_pythons() -> None:
    mine, count = Index(), 20_000
    before = sys.getallocatedblocks()
    for first in range(0, count, 1000):
        mine.add(objects_of(list(range(first, first + 1000)), "a"))
    assert sys.getallocatedblocks() - before < count / 10
    numbers = [*mine._objects._columns.values(), *mine._pages._columns.values(), mine._table._hashes]
    rows = mine._segments["a"]
    nbytes = sum(each.numbers.nbytes for each in numbers) + mine._table._slots.said.nbytes
    nbytes += sum(each.itemsize * len(each) for each in (rows.records, rows.rows))
    assert count * 80 < nbytes < count * 150


def test_no_put_evicts_long_however_large_the_quota() -> None:
    assert _slack(4 << 40) == 16 << 20
    assert _slack(64 << 20) == 4 << 20
