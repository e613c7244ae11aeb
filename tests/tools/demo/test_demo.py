"""The demo: real fleets, real KV, the same tokens; and a report that would say so if they were not."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.errors import LayoutError
from kvmover.tools.demo import run as demo
from kvmover.tools.demo.demo_engine import same_rows
from kvmover.tools.demo.demo_report import RequestReport, RunReport, ScenarioReport, Wire, show
from kvmover.tools.demo.run import DemoOptions, run, run_demo
from kvmover.transport import nixl_version

UNEVEN = DemoOptions(scenarios=("uneven",), requests=2)

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def uneven(crew: None) -> tuple[RunReport, list[tuple[str, int]]]:
    steps: list[tuple[str, int]] = []
    return run(UNEVEN, lambda what, requests: steps.append((what, requests))), steps


def test_three_ranks_prefill_two_decode_and_the_tokens_are_those_of_one_process(
    uneven: tuple[RunReport, list[tuple[str, int]]],
):
    report, steps = uneven
    assert report.tokens_identical
    assert report.bytes_identical
    assert report.passed
    (scenario,) = report.scenarios
    assert scenario.name == "uneven"
    for request in scenario.requests:
        assert request.answer == request.expected
        assert len(request.answer) >= 2
        assert len(request.wire.sent_bytes) == 3
        assert sum(request.wire.sent_bytes) == request.wire.nbytes > 0
    assert [requests for _, requests in steps] == [0, 1, 1]


def test_the_second_turn_hits_what_the_first_one_left_and_moves_only_the_rest(
    uneven: tuple[RunReport, list[tuple[str, int]]],
):
    first, second = uneven[0].requests
    assert first.hit_tokens == 0
    assert first.prompt_tokens < second.prompt_tokens
    assert 0 < second.hit_tokens < second.prompt_tokens
    assert second.hit_tokens % 24 == 0  # whole pages of the destination
    assert second.wire.nbytes < first.wire.nbytes
    per_token = first.wire.nbytes / first.prompt_tokens
    assert second.wire.nbytes == per_token * (second.prompt_tokens - second.hit_tokens)


def test_the_json_has_what_others_script_against(uneven: tuple[RunReport, list[tuple[str, int]]]):
    data = json.loads(json.dumps(uneven[0].as_data()))
    assert data.keys() >= {"passed", "tokens_identical", "bytes_identical", "nixl", "seconds", "scenarios", "summary"}
    assert data["passed"] is True
    assert data["tokens_identical"] is True
    assert data["bytes_identical"] is True
    assert data["nixl"] == {"version": nixl_version(), "backend": "UCX"}
    (scenario,) = data["scenarios"]
    assert scenario.keys() >= {"name", "title", "tokens_identical", "bytes_identical", "requests"}
    assert scenario["tokens_identical"] is True
    for request in scenario["requests"]:
        assert request.keys() >= {
            *("name", "prompt_tokens", "hit_tokens", "moved_tokens", "tokens_identical", "bytes_identical"),
            *("answer", "expected", "bytes", "legs", "descriptors_direct", "descriptors_packed"),
            *("routes", "seconds", "gb_per_s", "sent_bytes"),
        }
        assert request["moved_tokens"] == request["prompt_tokens"] - request["hit_tokens"]


def test_the_last_line_says_in_words_what_happened(uneven: tuple[RunReport, list[tuple[str, int]]]):
    report, _ = uneven
    words = report.sentence()
    answers = sum(len(request.answer) for request in report.requests)
    assert words.startswith(f"All {answers} tokens of 2 requests in 1 scenario are those of the one-process model")
    assert "bit for bit" in words
    assert f"{report.requests[1].hit_tokens} prompt tokens were there already" in words
    assert last_line(report) == words


def last_line(report: RunReport) -> str:
    page = io.StringIO()
    show(report, Console(file=page, width=1000))
    return page.getvalue().rstrip().splitlines()[-1].rstrip()


# What the report says of a move that went wrong

WIRE = Wire(1000, 2, 10, 2, ["packed"], 0.001, [500, 500])
RIGHT = RequestReport("uneven-0", 10, 0, [1, 2, 3], [1, 2, 3], True, True, WIRE)
WRONG = [
    replace(RIGHT, answer=[1, 2, 4]),
    replace(RIGHT, answer=[1, 2]),
    replace(RIGHT, gaps_agree=False),
    replace(RIGHT, bytes_identical=False),
]


def report_of(*requests: RequestReport) -> RunReport:
    return RunReport([ScenarioReport("uneven", "a title", list(requests))], 1.0, "1.5.1")


@pytest.mark.parametrize("wrong", WRONG, ids=["other token", "fewer tokens", "other logits", "other bytes"])
def test_one_request_that_differs_fails_the_run_and_is_named(
    wrong: RequestReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    report = report_of(RIGHT, replace(wrong, name="uneven-1"))
    assert wrong.tokens_identical == (wrong.answer == wrong.expected and wrong.gaps_agree)
    assert not report.passed
    said = "FAILED: 1 of 2 requests differ from the one-process model: ['uneven-1']"
    assert report.sentence() == said
    assert last_line(report) == said
    data = report.as_data()
    assert not (data["tokens_identical"] and data["bytes_identical"])
    assert not (data["scenarios"][0]["tokens_identical"] and data["scenarios"][0]["bytes_identical"])
    assert data["summary"] == said
    monkeypatch.setattr(demo, "run", lambda *given: report)
    assert run_demo(replace(UNEVEN, as_json=True)) == 1
    assert json.loads(capsys.readouterr().out)["summary"] == said


def test_a_run_that_is_right_exits_with_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(demo, "run", lambda *given: report_of(RIGHT))
    assert run_demo(replace(UNEVEN, as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["tokens_identical"] is True


def digests(*rows: tuple[tuple[int, int, int], str]) -> dict[tuple[int, int, int], str]:
    return dict(rows)


HEAD_0, HEAD_1 = (0, 0, 0), (0, 0, 1)
SENT = [digests((HEAD_0, "a"), (HEAD_1, "b")), digests((HEAD_1, "b"))]


def test_rows_that_are_everywhere_the_same_are_the_same():
    assert same_rows(SENT, [digests((HEAD_0, "a")), digests((HEAD_0, "a"), (HEAD_1, "b"))])


@pytest.mark.parametrize(
    ("sent", "landed"),
    [
        (SENT, [digests((HEAD_0, "a")), digests((HEAD_0, "x"), (HEAD_1, "b"))]),
        (SENT, [digests((HEAD_0, "b"), (HEAD_1, "a"))]),
        ([SENT[0], digests((HEAD_1, "x"))], [digests((HEAD_1, "b"))]),
        ([SENT[0], digests((HEAD_1, "x"))], [digests((HEAD_1, "x"))]),
    ],
    ids=["one replica differs", "heads are swapped", "sources disagree", "sources disagree, last one landed"],
)
def test_one_row_that_differs_is_found(sent: list, landed: list):
    assert not same_rows(sent, landed)


def test_rows_that_nobody_sent_are_found():
    with pytest.raises(KeyError):
        same_rows([digests((HEAD_0, "a"))], [digests((HEAD_1, "b"))])


# A trace


def test_requests_of_a_trace_that_share_hash_ids_hit(crew: None, tmp_path: Path):
    trace = tmp_path / "three.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1800, "output_length": 200, "hash_ids": [7, 8, 9, 10]},
        {"timestamp": 5, "input_length": 2048, "output_length": 150, "hash_ids": [7, 8, 9, 11]},
        {"timestamp": 9, "input_length": 600, "output_length": 100, "hash_ids": [12, 13]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run(replace(UNEVEN, requests=3, trace=trace, scale=0.05), lambda what, requests: None)
    assert report.passed, report.sentence()
    first, second, third = report.requests
    assert [request.hit_tokens for request in (first, third)] == [0, 0]
    assert second.hit_tokens == 3 * 26 // 24 * 24  # of three shared pages of 512 tokens, 26 each after scaling
    assert second.wire.nbytes < first.wire.nbytes


def test_a_scenario_that_does_not_exist_is_named():
    with pytest.raises(LayoutError, match="unknown scenario 'nope'; known are smollm2, gqa"):
        run(DemoOptions(scenarios=("nope",)), lambda what, requests: None)
