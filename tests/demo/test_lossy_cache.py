"""The demo's fleet in fp8: the model reads what its pool stores, and how far answers are off is stated."""

from __future__ import annotations

import pytest
import torch

from kvmover.demo.engine import _gaps_moved
from kvmover.demo.report import RequestReport, ScenarioReport, Wire
from kvmover.demo.stored_plane import StoredPlane, restored
from kvmover.layout import Codec

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


def test_a_scenario_states_what_was_lost_and_one_that_loses_nothing_is_silent() -> None:
    wire = Wire(1, 1, 1, 1, ["packed"], 1.0, [1])
    requests = [RequestReport("a", 1, 0, [1, 9], [1, 2], True, True, wire, gaps_moved=0.25, compared=1)]
    assert requests[0].tokens_identical
    said = ScenarioReport("fp8", "", requests, 0.0625).loss()
    assert "off by 0.0625 of itself" in said
    assert said.endswith("moved by 0.25 at most, which decided 1 near ties otherwise")
    assert not ScenarioReport("gqa", "", requests).loss()
