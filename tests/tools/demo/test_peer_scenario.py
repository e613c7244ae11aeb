"""The demo's peer scenario: fleets of unlike shape read from each other's hosts, and one is killed as it lends."""

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


@pytest.mark.timeout(100)
def test_fleets_serve_each_others_prefixes_and_one_that_is_killed_as_it_lends_costs_hits_alone(
    crew: None, monkeypatch: pytest.MonkeyPatch
):
    texts = "tp=2,page=16,order=NHD", "tp=1,page=32,order=HND", "tp=1,page=64,order=NHD"
    lenders = tuple(map(FleetText.parse, texts))
    small = tuple(replace(scenario, lenders=lenders) for scenario in choose(("peer",)))
    monkeypatch.setattr(demo, "choose", lambda names: small)
    report = run(DemoOptions(scenarios=("peer",)), lambda what, requests: None)
    assert report.passed
    computed, second, third, back, last = report.scenarios[0].requests
    assert sum(computed.hits.values()) == 0
    for request in (second, third, back):
        assert request.hits["peer"] > 0
        assert request.wire.nbytes > 0
    assert last.hits["device"] >= second.prompt_tokens // 32 * 32  # its own, whatever became of the rest
    assert "came from another fleet's host" in report.sentence()
