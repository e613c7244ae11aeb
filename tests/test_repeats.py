"""Warnings that say the same for ever are a line a minute, and a flood of names is no flood of lines."""

from __future__ import annotations

import pytest

from kvmover.repeats import MAX_KEYS, Repeats


def test_a_warning_that_repeats_is_written_once_a_minute_with_the_number_left_out() -> None:
    repeats = Repeats()
    said = [repeats.more(("p.1", "seat"), float(second)) for second in range(181)]
    assert {second: more for second, more in enumerate(said) if more is not None} == {
        0: "",
        60: " (59 more like it since the last line)",
        120: " (59 more like it since the last line)",
        180: " (59 more like it since the last line)",
    }


def test_what_comes_less_often_is_written_each_time_and_adds_nothing() -> None:
    repeats = Repeats()
    assert [repeats.more("key", at) for at in (0.0, 60.0, 121.0, 999.0)] == [""] * 4


def test_peers_and_reasons_are_told_apart() -> None:
    repeats = Repeats()
    keys = [(peer, reason) for peer in ("p.1", "p.2") for reason in ("seat", "weights")]
    assert [repeats.more(key, 0.0) for key in keys] == [""] * 4
    assert [repeats.more(key, 1.0) for key in keys] == [None] * 4


@pytest.mark.parametrize("minutes", [1, 3])
def test_who_makes_up_names_gets_no_more_lines_a_minute_than_there_are_keys(minutes: int) -> None:
    repeats, a_minute = Repeats(), 4 * MAX_KEYS
    said = [repeats.more(f"p.{name}", name / a_minute * 60) for name in range(a_minute * minutes)]
    assert len([more for more in said if more is not None]) == MAX_KEYS * minutes
    assert len(repeats._written) <= MAX_KEYS


def test_the_oldest_line_makes_room_when_its_minute_is_over() -> None:
    repeats = Repeats()
    for number in range(MAX_KEYS):
        assert repeats.more(number, float(number) / MAX_KEYS) == ""
    assert repeats.more("one more", 59.0) is None
    assert repeats.more("one more", 60.0) == ""
    assert repeats.more(1, 60.0) is None, "its own minute is not over"
