"""What a scrape says of a controller."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from rig import Rank

from kvmover.cache.tiers.tier_metrics import METRICS, TierCollector, TierCount, TierGauge, TierStage

PROMPT = list(range(33))


def test_a_scrape_has_what_was_moved_in_pages_and_bytes(tmp_path):
    rank = Rank(tmp_path)
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.forget()
    rank.serve(PROMPT)
    rank.controller.wait()
    registry = CollectorRegistry()
    registry.register(TierCollector(rank.controller.snapshot))
    said = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in generate_latest(registry).decode().splitlines()
        if not line.startswith("#")
    }
    at = '{engine="engine",rank="0"}'
    nbytes = 8 * rank.tiered_pools[0].part.nbytes
    for verb in ("backed", "loaded", "stored", "fetched"):
        assert said[f"kvmover_tier_{verb}_pages_total{at}"] == 8, verb
        assert said[f"kvmover_tier_{verb}_bytes_total{at}"] == nbytes, verb
    assert said[f"kvmover_tier_restore_seconds_count{at}"] == 2
    assert said[f"kvmover_tier_open_operations{at}"] == 0
    rank.close()


def test_everything_counted_has_a_metric():
    assert list(METRICS) == [*TierCount, *TierGauge, *TierStage]
