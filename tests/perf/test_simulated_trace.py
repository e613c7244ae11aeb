"""A trace that is counted by kinds of requests is the trace that movers move, to the byte and to the message."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random

import pytest

from perf import simulate_trace
from perf.simulate_trace import COMPONENT, Death, moved, replay, requests_of

ENGINES = 2


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prompts of two lengths; each death is a warning."""
    monkeypatch.setattr(simulate_trace, "PROMPTS", {512: 1, 1024: 1})
    simulate_trace.cost_of.cache_clear()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_a_trace_with_deaths_has_the_messages_and_bytes_of_whole_movers() -> None:
    deaths = [Death(1.5, "p1"), Death(2.0, "d0")]
    requests = requests_of(16, 12.0, ENGINES, deaths, Random(1))
    one, other = moved(requests, deaths, ENGINES), replay(requests, deaths, ENGINES)
    assert one.failed == other.failed > 2
    assert len(one.took) == len(other.took) == 16
    assert (+one.messages, +one.nbytes) == (+other.messages, +other.nbytes)
    landed = sum(request.tokens for request in requests) * COMPONENT.token_bytes
    assert other.nbytes.total() < landed, "requests that failed were asked for again"
