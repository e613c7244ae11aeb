"""NVTX ranges: every step of a transfer opens one with its request and bytes, and closes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvmover.plan.cost import Route
from kvmover.transfer import nvtx_ranges as ranges
from kvmover.transfer.result import Gate
from tests.transfer.mover_fleets import CONFIG, Pair


@dataclass
class Recorder:
    """Stands in for an NVTX domain."""

    opened: list[tuple[str, int]] = field(default_factory=list)
    depth: int = 0

    def get_event_attributes(self, message: str, payload: int) -> tuple[str, int]:
        return message, payload

    def push_range(self, attributes: tuple[str, int]) -> None:
        self.opened.append(attributes)
        self.depth += 1

    def pop_range(self) -> None:
        self.depth -= 1


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    domain = Recorder()
    monkeypatch.setattr(ranges, "_domain", lambda: domain)
    return domain


def test_a_span_carries_its_step_request_and_bytes_and_closes_on_failure(recorder: Recorder):
    with pytest.raises(KeyError), ranges.span(ranges.GATHER, "one", 4096):
        raise KeyError
    assert recorder.opened == [("gather one", 4096)]
    assert recorder.depth == 0


def test_without_a_listener_a_span_is_one_shared_object(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranges, "_domain", lambda: None)
    spans: list[Any] = [ranges.span(ranges.POST, str(n)) for n in range(2)]
    assert spans[0] is spans[1]
    with spans[0]:
        pass


def test_every_step_of_a_request_is_shown_with_its_bytes(recorder: Recorder):
    pair = Pair.of(tokens=8)
    pair.bench.ended([*pair.send("shown"), *pair.receive("shown")])
    steps = {message: payload for message, payload in recorder.opened if message.endswith("shown")}
    assert set(steps) == {"plan shown", "gather shown", "post shown", "scatter shown"}
    assert steps["gather shown"] == steps["post shown"] == steps["scatter shown"] == 4096
    assert recorder.depth == 0


class Event:
    """Stands in for a CUDA event that passes when it is told to."""

    passed = False

    def query(self) -> bool:
        return self.passed


def test_a_direct_write_waits_for_the_pages_to_be_produced_and_holds_up_nobody():
    pair = Pair.of(tokens=8, config=replace(CONFIG, route=Route.DIRECT))
    event: Any = Event()
    (mover,) = pair.src.movers
    late = mover.send("late", pair.src_tables[0], gates=[Gate(event)])
    asked = pair.receive("late")
    others = [[np.setdiff1d(np.arange(64), table)[:2] for table in tables] for tables in pair.dst_tables]
    pair.bench.ended([*pair.send("other"), *pair.dst.receive("other", "prefill", range(8), others)])
    pair.bench.turn()
    assert not late.ended
    assert not asked[0].ended
    event.passed = True
    pair.bench.ended([late, *asked])
    before = pair.dst.landed(pair.before, others, pair.truth)
    pair.dst.assert_holds(pair.dst.landed(before, pair.dst_tables, pair.truth))
