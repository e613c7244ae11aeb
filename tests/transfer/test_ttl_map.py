"""A table that forgets: the latest entries, until they end."""

from __future__ import annotations

from kvmover.transfer.tombstones import TtlMap


def test_an_entry_is_there_until_its_end_and_no_longer():
    table = TtlMap[str, int](8)
    table.keep("a", 1, until=2.0)
    table.keep("b", 2, until=3.0)
    table.expire(1.9)
    assert (table.get("a"), table.get("b")) == (1, 2)
    table.expire(2.0)
    assert (table.get("a"), table.get("b"), len(table)) == (None, 2, 1)


def test_a_full_table_forgets_what_it_was_told_first():
    table = TtlMap[int, None](3)
    for key in range(5):
        table.keep(key, None, until=9.0)
    assert [key in table for key in range(5)] == [False, False, True, True, True]


def test_what_is_kept_again_counts_as_new():
    table = TtlMap[str, int](2)
    table.keep("a", 1, until=1.0)
    table.keep("b", 2, until=2.0)
    table.keep("a", 3, until=5.0)
    table.keep("c", 4, until=6.0)
    assert (table.get("a"), table.get("b"), table.get("c")) == (3, None, 4)
    table.expire(1.0)
    assert table.get("a") == 3, "its first end no longer counts"


def test_looking_for_ends_visits_only_what_has_ended():
    """A poll is many times a second, and a busy rank remembers tens of thousands."""
    visits = 0

    class Counted(float):
        def __le__(self, other: object) -> bool:
            nonlocal visits
            visits += 1
            return float(self) <= float(other)  # type: ignore[arg-type]

        def __gt__(self, other: object) -> bool:
            return not self <= other

    table = TtlMap[int, None](10_000)
    for key in range(1000):
        table.keep(key, None, until=Counted(1.0 if key < 10 else 2.0))
    table.expire(1.5)
    assert (len(table), visits) == (990, 11)
