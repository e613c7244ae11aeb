"""What a soak excuses: a failure in an outage whose client was told why, and nothing else."""

from __future__ import annotations

import pytest

from tests.live.answers import Answer
from tests.live.load import Load, Served
from tests.live.soak import Outage, unexplained

OUTAGES = (Outage(10, 20), Outage(40, 50))

REFUSED = Answer(0, 0.0, error="ConnectionRefusedError [Errno 111] Connection refused")
TOLD = Answer(500, 0.0, error="Lost connection with prefill instance")


@pytest.mark.parametrize(
    ("answer", "began", "ended", "excused"),
    [
        (Answer(200, 0.0), 1, 2, True),
        (REFUSED, 12, 13, True),
        (REFUSED, 9, 11, True),
        (REFUSED, 21, 22, False),
        (TOLD, 21, 22, True),
        (TOLD, 25, 26, False),
        (TOLD, 5, 9, False),
        (Answer(500, 0.0), 12, 13, False),
        (Answer(0, 60.0, error="TimeoutError timed out"), 12, 72, False),
    ],
)
def test_a_failure_is_excused_in_an_outage_and_by_its_reason(
    answer: Answer, began: float, ended: float, excused: bool
) -> None:
    assert (not unexplained([Served([1], answer, began, ended)], OUTAGES, silence_s=4)) is excused


def test_a_load_ends_with_all_that_it_began() -> None:
    load = Load(sum, ([each] for each in range(1000)), clients=2, rest_s=0.001)
    load.more(20)
    done = load.end()
    assert len(done) >= 20
    assert sorted(each.answer for each in done) == sorted(each.prompt[0] for each in done) == list(range(len(done)))
