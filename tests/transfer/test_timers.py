"""Timers: each key is due once, at the time that was set last, however often it was put off."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer import core
from kvmover.transfer.core import Timers

MOST = 1000


def test_what_is_due_comes_once_and_the_longest_due_first():
    clock = Timers[str]()
    for key, due in (("late", 9.0), ("first", 1.0), ("second", 2.0)):
        clock.set(key, due)
    assert clock.take(0.9, MOST) == []
    assert clock.take(2.0, MOST) == ["first", "second"]
    assert clock.take(2.0, MOST) == []
    assert clock.take(9.0, MOST) == ["late"]
    assert len(clock) == 0


def test_keys_of_one_time_come_in_the_order_in_which_they_were_set():
    clock = Timers[str]()
    for key in "bca":
        clock.set(key, 1.0)
    assert clock.take(1.0, MOST) == ["b", "c", "a"]


def test_a_timer_that_was_put_off_or_cancelled_is_not_due_at_its_old_time():
    clock = Timers[str]()
    for key in ("off", "gone", "never", "sooner"):
        clock.set(key, 1.0)
    clock.set("off", 3.0)
    clock.cancel("gone")
    clock.set("never", math.inf)
    clock.sooner("sooner", 2.0)
    assert clock.take(2.9, MOST) == ["sooner"]
    assert "off" in clock
    assert "gone" not in clock
    assert clock.take(3.0, MOST) == ["off"]


def test_a_timer_that_was_put_off_comes_after_what_was_due_before_it():
    clock = Timers[str]()
    clock.set("off", 1.0)
    clock.set("other", 2.0)
    clock.set("off", 3.0)
    assert clock.take(5.0, MOST) == ["other", "off"]


def test_a_timer_that_was_brought_forward_is_due_once():
    clock = Timers[str]()
    clock.set("key", 5.0)
    clock.sooner("key", 1.0)
    assert clock.take(1.0, MOST) == ["key"]
    clock.set("key", 7.0)
    assert clock.take(6.0, MOST) == []
    assert clock.take(7.0, MOST) == ["key"]


def test_what_is_due_beyond_the_most_that_one_poll_takes_comes_with_the_next():
    clock = Timers[int]()
    for key in range(10):
        clock.set(key, key / 10)
    assert [clock.take(1.0, 4) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]


def test_a_timer_that_is_moved_to_and_fro_costs_no_memory():
    clock = Timers[int]()
    for move in range(10_000):
        clock.set(move % 3, float(10_000 - move))
    assert len(clock._heap) <= 2 * len(clock) + core.SLACK


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "sooner", "cancel", "take", "rebuild"]), st.sampled_from("abcd"), st.integers(0, 20)
        ),
        max_size=60,
    )
)
def test_timers_are_a_table_of_due_times(moves: list[tuple[str, str, int]]):
    clock, table = Timers[str](), dict[str, float]()
    for move, key, time in moves:
        match move:
            case "set":
                clock.set(key, float(time))
                table[key] = float(time)
            case "sooner":
                clock.sooner(key, float(time))
                table[key] = min(float(time), table.get(key, math.inf))
            case "cancel":
                clock.cancel(key)
                table.pop(key, None)
            case "rebuild":
                clock._rebuild()
            case _:
                taken = clock.take(float(time), MOST)
                assert sorted(taken) == sorted(k for k, due in table.items() if due <= time)
                assert [table[k] for k in taken] == sorted(table[k] for k in taken)
                for k in taken:
                    del table[k]
        assert len(clock) == len(table)
        assert {k for k in "abcd" if k in clock} == table.keys()
