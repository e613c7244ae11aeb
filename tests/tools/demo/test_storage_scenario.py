"""The demo's storage scenario: what a fleet stored serves the next one, of another shape, when the first is gone."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.plan.fleet_text import FleetText
from kvmover.store.command import stat_stores
from kvmover.tools.demo import run as demo
from kvmover.tools.demo.run import DemoOptions, run
from kvmover.tools.demo.scenarios import choose


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario with two small fleets."""
    lives = tuple(FleetText.parse(text) for text in ("tp=2,page=16,order=NHD", "tp=1,page=16,order=HND"))
    small = tuple(replace(scenario, lives=lives) for scenario in choose(("storage",)))
    monkeypatch.setattr(demo, "choose", lambda names: small)


@pytest.mark.timeout(100)
def test_a_store_of_ones_own_serves_the_run_and_is_left_empty(crew: None, short: None, tmp_path: Path):
    for _ in range(2):  # the second finds nothing of the first
        report = run(DemoOptions(scenarios=("storage",), requests=2, store=str(tmp_path)), lambda what, requests: None)
        first, second = report.scenarios[0].requests
        assert report.passed
        assert first.hits["storage"] == 0
        assert second.hits["storage"] > 0
    assert [(row.stat.pages, row.stat.objects) for row in stat_stores(tmp_path, None)] == [(0, 0), (0, 0)]


@pytest.mark.timeout(100)
def test_a_second_turn_is_served_from_storage_by_a_fleet_of_another_tp(crew: None, short: None):
    report = run(DemoOptions(scenarios=("storage",), requests=2), lambda what, requests: None)
    first, second = report.scenarios[0].requests
    assert report.passed
    assert first.hits == {"device": 0, "host": 0, "storage": 0}
    kept_tokens = (first.prompt_tokens + len(first.answer) - 1) // 16 * 16
    assert second.hits == {"device": 0, "host": 0, "storage": kept_tokens}
    assert second.hit_tokens == second.hits["storage"] > 0
    assert second.answer == second.expected
    assert second.wire.nbytes > 0
    assert "prompt tokens from the page store" in report.sentence()
