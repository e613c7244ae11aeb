"""Tally: a request is one, however many ranks moved it, and it landed only if all of it did."""

from __future__ import annotations

import pytest

from kvmover.engines.vllm.connector_metadata import RankEnding, Tally


def ending(request: str = "r", way: str = "sent", landed: bool = True, microseconds: int = 5) -> RankEnding:
    return RankEnding(way, request, landed, microseconds)


def test_a_request_counts_when_its_last_rank_has_told_and_takes_as_long_as_the_slowest() -> None:
    tally = Tally(3)
    tally.hear([ending(microseconds=5), ending(microseconds=900)])
    assert not tally.take()
    tally.hear([ending(microseconds=70), ending("other", microseconds=1)])
    assert tally.take() == {"sent_requests": 1, "sent_microseconds": 900}
    assert not tally.take()


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_request_that_failed_on_one_rank_has_failed_once(failed: int) -> None:
    tally = Tally(3)
    tally.hear([ending(landed=rank != failed, way="received") for rank in range(3)])
    assert tally.take() == {"received_failures": 1}


def test_ways_and_requests_are_counted_apart_and_a_name_may_come_again() -> None:
    """A preempted prefill ends and is offered again under its name; an engine may send what it received."""
    tally = Tally(2)
    tally.hear([ending(landed=False), ending(way="received"), ending("other"), ending(landed=False)])
    tally.hear([ending(), ending("other"), ending(way="received")])
    tally.hear([ending(microseconds=2)])
    assert tally.take() == {
        "sent_failures": 1,
        "sent_requests": 2,
        "sent_microseconds": 10,
        "received_requests": 1,
        "received_microseconds": 5,
    }
