"""A scrape over HTTP of all that has metrics is what docs/metrics.md says, and feeds each panel of the dashboard."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from rig import Rank

from kvmover.cache.hints import PinCollector, PinLimits, Pins
from kvmover.cache.ledger import Ledger, LedgerCollector, Residency
from kvmover.cache.prefix import FULL
from kvmover.cache.tiers import TierCollector
from kvmover.config.settings import MetricsSettings
from kvmover.observe.endpoint import serve_metrics
from kvmover.observe.metrics import MoverCollector
from kvmover.store import KeeperCollector, KeeperServer, StoreCollector
from tests.observe.toy_engines import Engines

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: nothing can be served")

DOCS = Path(__file__).parents[3] / "docs"


def test_a_scrape_is_what_the_page_says_and_has_every_series_of_the_dashboard_and_the_alerts(tmp_path):
    engines, rank = Engines(), Rank(tmp_path)
    rank.serve(list(range(33)))
    rank.controller.wait()
    rank.controller.meter.dropped["store", "evicted before it was stored"] += 1
    keeper = KeeperServer(tmp_path / "kv.sock", 8 << 20)
    mover, rest = serve_metrics(MetricsSettings(0, "127.0.0.1"), 0, MoverCollector([engines.src])), None
    assert mover is not None
    try:
        beside = MetricsSettings(mover.port, "127.0.0.1")
        rest = serve_metrics(
            beside,
            0,
            LedgerCollector(Ledger(), {"device": Residency()}),
            TierCollector(rank.controller.snapshot),
            PinCollector(Pins(rank.tree, {FULL: 16}, PinLimits())),
            StoreCollector(rank.store, "engine", 0),
            KeeperCollector(lambda: keeper.snapshot),
        )
        assert rest is not None
        assert rest.port == mover.port, "parts of a rank share its port"
        with urllib.request.urlopen(f"http://127.0.0.1:{rest.port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    finally:
        for served in (rest, mover):
            if served is not None:
                served.close()
        rank.close()
        keeper.close()
    page = dict(re.findall(r"^\| `(kvmover_\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.M))
    scraped = dict(re.findall(r"^# TYPE (kvmover_\w+) (\w+)$", text, re.M))
    scraped = {name: kind for name, kind in scraped.items() if not name.endswith("_created")}
    assert scraped == page
    panels = json.loads((DOCS / "dashboard.json").read_text())["panels"]
    shown = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    for series in set(re.findall(r"\bkvmover_\w+", shown + (DOCS / "alerts.yml").read_text())):
        base = re.sub(r"_(bucket|sum|count)$", "", series)
        assert base in scraped or series in scraped, series


def test_an_endpoint_ends_with_the_last_part_that_serves_at_it():
    ledger, rank = LedgerCollector(Ledger()), Rank(None)
    first = serve_metrics(MetricsSettings(0, "127.0.0.1"), 0, ledger)
    assert first is not None
    second = serve_metrics(
        MetricsSettings(first.port, "127.0.0.1"), 0, PinCollector(Pins(rank.tree, {FULL: 16}, PinLimits()))
    )
    assert second is not None
    first.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{second.port}/metrics", timeout=20) as answer:
        said = answer.read().decode()
    assert "kvmover_pinned_pages" in said
    assert "kvmover_prompt_tokens" not in said
    second.close()
    rank.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{second.port}/metrics", timeout=20)
