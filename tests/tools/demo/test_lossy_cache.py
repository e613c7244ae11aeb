"""The demo's fleet in fp8: the model reads what its pool stores, and how far answers are off is stated."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from kvmover.layout import Codec
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo import run as demo
from kvmover.tools.demo.demo_engine import _gaps_moved
from kvmover.tools.demo.demo_report import RequestReport, RunReport, ScenarioReport, Wire, show
from kvmover.tools.demo.scenarios import choose
from kvmover.tools.demo.stored_plane import StoredPlane, restored

WIDE, FP8 = Codec.plain("bfloat16", 32), Codec.fp8("bfloat16", 32)


def test_a_model_reads_the_numbers_that_its_pool_stores_and_writes_no_others() -> None:
    rows = torch.full((4, 16, 2, FP8.row_bytes), 0xEE, dtype=torch.uint8)
    plane, numbers = StoredPlane(rows, FP8), torch.randn(3, 2, 32, dtype=torch.float64)
    where = torch.tensor([2, 2, 0]), torch.tensor([5, 6, 0])
    plane[where] = numbers
    assert (plane[where] - numbers).abs().max() <= numbers.abs().max() / 16
    rows[where] = 0xEE
    assert (rows == 0xEE).all()


def test_rows_in_another_form_are_those_of_the_definition() -> None:
    numbers = torch.randn(5, 2, 32, dtype=torch.float64)
    wide, narrow = (torch.zeros(1, 5, 2, form.row_bytes, dtype=torch.uint8) for form in (WIDE, FP8))
    where = torch.zeros(5, dtype=torch.int64), torch.arange(5)
    StoredPlane(wide, WIDE)[where] = numbers
    StoredPlane(narrow, FP8)[where] = StoredPlane(wide, WIDE)[where]
    assert torch.equal(restored(wide[0], WIDE, FP8), narrow[0])
    assert torch.equal(restored(wide[0], WIDE, WIDE), wide[0])


@pytest.mark.parametrize(
    ("answer", "gaps", "moved"),
    [
        ([1, 2, 3], [0.5, 0.4, 0.3], (0.0, 3)),
        ([1, 2, 3], [0.5, 0.2, 0.3], (0.2, 3)),
        ([1, 9, 9], [0.5, 0.1, 9.0], (0.5, 1)),  # 0.4 above it before, 0.1 below it now; what follows is another text
        ([1, 2, 9], [0.5, 0.4, 5.0], (4.7, 3)),  # no near tie: a wrong row
    ],
)
def test_gaps_are_compared_up_to_a_near_tie(answer: list[int], gaps: list[float], moved: tuple[float, int]) -> None:
    found, compared = _gaps_moved(answer, gaps, [1, 2, 3], [0.5, 0.4, 0.3], tolerance=0.6)
    assert (pytest.approx(found), compared) == moved


WIRE = Wire(1, 1, 1, 1, ["packed"], 1.0, [1])
TIED = RequestReport("fp8-0", 1, 0, [1, 9, 8], [1, 2, 3], True, True, WIRE, gaps_moved=0.25, compared=1)
SAME = RequestReport("fp8-1", 1, 0, [4, 5], [4, 5], True, True, WIRE, gaps_moved=0.125, compared=2)


def run_of(*requests: RequestReport) -> RunReport:
    return RunReport([ScenarioReport("fp8", "a title", list(requests), 0.0625)], 1.0, "1.5.1")


def test_a_scenario_states_what_was_lost_and_one_that_loses_nothing_is_silent() -> None:
    said = ScenarioReport("fp8", "", [TIED, SAME], 0.0625).loss()
    assert "off by 0.0625 of itself" in said
    assert said.endswith("moved by 0.25 at most, which decided 1 near ties otherwise")
    assert not ScenarioReport("gqa", "", [TIED, SAME]).loss()


def test_tokens_after_a_near_tie_are_not_called_those_of_the_one_process_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = run_of(TIED, SAME)
    assert report.sentence().startswith(
        "3 of 5 tokens of 2 requests in 1 scenario are those of the one-process model; "
        "2 follow a near tie that fp8 decided otherwise: "
    )
    data = report.as_data()
    assert not data["tokens_identical"]
    assert not data["scenarios"][0]["tokens_identical"]
    said = [(request["tokens_identical"], request["after_near_tie"]) for request in data["scenarios"][0]["requests"]]
    assert said == [(False, 2), (True, 0)]
    page = io.StringIO()
    show(report, Console(file=page, width=200))
    assert re.search(r"1 of 3 same, then a near tie", page.getvalue())
    assert re.search(r"\b2 same", page.getvalue())
    assert data["passed"]
    monkeypatch.setattr(demo, "run", lambda *given: report)
    assert demo.run_demo(demo.DemoOptions(as_json=True)) == 0


@pytest.mark.parametrize("wrong", [{"answer": [7, 9, 8]}, {"gaps_agree": False}, {"bytes_identical": False}])
def test_a_near_tie_excuses_nothing_before_it(wrong: dict[str, object]) -> None:
    report = run_of(replace(TIED, **wrong), SAME)  # pyright: ignore[reportArgumentType]
    assert not report.passed
    assert report.sentence() == "FAILED: 1 of 2 requests differ from the one-process model: ['fp8-0']"


def test_every_token_that_a_real_run_calls_the_same_is(crew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (scenario,) = choose(("fp8",))
    small = replace(scenario, src=FleetText.parse("tp=1,page=16,order=NHD,dtype=bfloat16"))
    monkeypatch.setattr(demo, "choose", lambda names: (small,))
    report = demo.run(demo.DemoOptions(), lambda what, requests: None)
    assert report.passed
    differ = sum(a != b for each in report.requests for a, b in zip(each.answer, each.expected, strict=True))
    called = sum(0 if each.tokens_identical else each.after_near_tie for each in report.requests)
    assert 0 < differ <= called
    assert f"; {called} follow a near tie that fp8 decided otherwise" in report.sentence()
