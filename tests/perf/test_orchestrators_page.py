"""The rows of orchestrators: equal answers, or the words of what stopped a setting."""

from __future__ import annotations

from perf.record import read

ROWS = read("live_orchestrators")


def test_every_row_has_equal_answers_alone_or_says_what_stopped_it() -> None:
    assert {(row["same"], row["wrong"], row["failed"]) for row in ROWS if not row["seen"]} == {("20", "0", "0")}
    assert {(row["same"], row["wrong"], row["failed"]) for row in ROWS if row["seen"]} == {("0", "0", "1")}


def test_each_orchestrator_has_a_setting_with_equal_answers() -> None:
    served = {(row["orchestrator"].split()[0], row["engine"].split()[0]) for row in ROWS if not row["seen"]}
    both = {(name, engine) for name in ("Dynamo", "llm-d-router") for engine in ("vllm", "sglang")}
    assert served == both | {("Ray", "vllm")}
