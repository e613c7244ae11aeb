"""The demo's keeper scenario: a fleet is killed, and one of another shape has all that it had committed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo import run as demo
from kvmover.tools.demo.run import DemoOptions, run
from kvmover.tools.demo.scenarios import choose


@pytest.mark.proof
@pytest.mark.timeout(100)
def test_a_fleet_that_was_killed_comes_back_as_another_and_computes_nothing_again(monkeypatch) -> None:
    lives = tuple(FleetText.parse(text) for text in ("tp=1,page=16,order=NHD", "tp=2,page=16,order=HND"))
    small = tuple(replace(scenario, lives=lives) for scenario in choose(("keeper",)))
    monkeypatch.setattr(demo, "choose", lambda names: small)
    report = run(DemoOptions(scenarios=("keeper",), requests=2), lambda what, requests: None)
    first, second = report.scenarios[0].requests
    assert report.passed
    assert first.hits == {"device": 0, "host": 0, "storage": 0}
    committed_tokens = (first.prompt_tokens + len(first.answer) - 1) // 16 * 16
    assert second.hits == {"device": 0, "host": 0, "storage": committed_tokens}
    assert second.answer == second.expected
