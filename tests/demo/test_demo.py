"""The demo end to end on one scenario, and the proof that its comparison can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvmover.demo.report import RequestReport, RunReport, ScenarioReport, Wire
from kvmover.demo.run import DemoOptions, run
from kvmover.demo.stage import _same_bytes

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None, reason="no NIXL wheel is installed"
)

WIRE = Wire(1000, 2, 50, 2, ["packed"], 0.01, [500, 500])
GOOD = RequestReport("one", 20, 4, [1, 2, 3], [1, 2, 3], True, True, WIRE)


def report(*requests: RequestReport) -> RunReport:
    return RunReport([ScenarioReport("s", "a scenario", list(requests))], 1.0, "1.5.1")


@needs_nixl
def test_fleets_that_neither_size_divides_generate_the_tokens_of_one_process():
    found = run(DemoOptions(scenarios=("uneven",), requests=2), lambda what, ended: None)
    first, second = found.requests
    assert found.identical
    assert found.sentence().startswith("All ")
    assert first.hit_tokens == 0
    assert second.hit_tokens > 0
    assert second.wire.nbytes == (second.prompt_tokens - second.hit_tokens) * 6 * 2 * 4 * 16 * 8
    assert sum(second.wire.sent_bytes) == second.wire.nbytes
    data = json.loads(json.dumps(found.as_data()))
    assert data["tokens_identical"] is True
    assert data["nixl"]["backend"] == "UCX"
    assert data["scenarios"][0]["requests"][1]["moved_tokens"] == second.prompt_tokens - second.hit_tokens


@needs_nixl
def test_a_trace_is_served_with_true_hits(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": n, "input_length": 1024, "output_length": 4, "hash_ids": [7, n]} for n in range(2)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run(DemoOptions(scenarios=("uneven",), requests=2, trace=trace, scale=0.1), lambda what, ended: None)
    assert found.identical
    assert [request.hit_tokens for request in found.requests] == [0, 48]  # 51 shared tokens, pages of 24


@pytest.mark.parametrize(
    "wrong",
    [
        replace(GOOD, answer=[1, 2, 4]),
        replace(GOOD, gaps_agree=False),
        replace(GOOD, bytes_identical=False),
    ],
    ids=["another token", "another gap", "other bytes"],
)
def test_one_wrong_request_fails_the_run(wrong: RequestReport):
    assert report(GOOD).identical
    found = report(GOOD, wrong)
    assert not found.identical
    assert found.sentence().startswith("FAILED: 1 of 2")
    assert not (found.as_data()["tokens_identical"] and found.as_data()["bytes_identical"])


def test_bytes_differ_when_any_rank_holds_another_row():
    rows = {(0, 0, 0): "a", (0, 0, 1): "b"}
    assert _same_bytes([(None, rows)], [(None, {(0, 0, 1): "b"}), (None, {(0, 0, 0): "a"})])
    assert not _same_bytes([(None, rows)], [(None, {(0, 0, 1): "a"})])
    assert not _same_bytes([(None, rows), (None, {(0, 0, 0): "c"})], [(None, {(0, 0, 0): "a"})])
