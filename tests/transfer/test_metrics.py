"""Metrics: what a scrape says is what happened, read back with the parser of the very client that serves it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mover_fleets import CONFIG, Pair
from progress_cases import Threads
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvmover.cache.ledger import Ledger
from kvmover.cache.ledger.ledger_collector import LedgerCollector
from kvmover.exposition import OPERATION_BOUNDS_S, DurationHistogram
from kvmover.layout import Fleet
from kvmover.observe.metrics import METRICS, Metered, MoverCollector
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Count, Gauge, Stage
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause
from perf import metrics_page

QUIET = replace(CONFIG, sandbox_bytes=0)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(movers: Iterable[Metered]) -> Samples:
    """Every sample of an exposition as Prometheus reads it, by name and labels."""
    registry = CollectorRegistry()
    registry.register(MoverCollector(movers))
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def at(samples: Samples, name: str, engine: str = "prefill", **labels: str) -> float:
    return samples[name, frozenset({"engine": engine, "rank": "0", **labels}.items())]


def test_a_scrape_says_what_was_moved():
    with Threads.of() as threads:
        source, target = threads.start()
        sent = source.send("request", threads.pair.src_tables[0])
        landed = target.receive("request", "prefill", range(100), threads.pair.dst_tables[0])
        source.wait([sent])
        target.wait([landed])
        found = scrape([source, target])
    for way, engine in (("sent", "prefill"), ("received", "decode")):
        assert at(found, f"kvmover_{way}_bytes_total", engine) == 100 * 1024
        assert at(found, f"kvmover_{way}_chunks_total", engine) == 25
    assert at(found, "kvmover_descriptors_total") == 25
    assert at(found, "kvmover_posted_chunks_total", route="packed") == 25
    assert at(found, "kvmover_posted_chunks_total", route="direct") == 0
    assert at(found, "kvmover_transfers_total", verb="send", end="landed") == 1
    assert at(found, "kvmover_transfers_total", "decode", verb="receive", end="landed") == 1
    for stage, engine in (("gather", "prefill"), ("wire", "prefill"), ("scatter", "decode"), ("credit_wait", "decode")):
        assert at(found, f"kvmover_{stage}_seconds_count", engine) == 25
        assert at(found, f"kvmover_{stage}_seconds_bucket", engine, le="+Inf") == 25
        assert 0 <= at(found, f"kvmover_{stage}_seconds_sum", engine) < 60
    assert at(found, "kvmover_receive_seconds_count", "decode") == 1
    assert at(found, "kvmover_peers", "decode") == 1
    assert at(found, "kvmover_outgoing_arena_bytes") == 1 << 20


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("route", [Route.PACKED, Route.DIRECT])
def test_the_parts_of_a_transfers_way_are_what_the_meter_timed_of_its_chunks(verb: Verb, route: Route) -> None:
    pair = Pair.of(config=replace(QUIET, verb=verb, route=route))
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.ended(transfers)
    seen = set[Stage]()
    for mover, transfer in zip(pair.bench.movers, transfers, strict=True):
        timed = {stage: each for stage, each in mover.snapshot().meter.stages.items() if sum(each.counts)}
        parts = {stage: each.sum_s for stage, each in timed.items() if stage not in (Stage.SEND, Stage.RECEIVE)}
        assert transfer.landed().spent_s == pytest.approx(parts)
        seen |= parts.keys()
    assert Stage.WIRE in seen
    assert ({Stage.GATHER, Stage.SCATTER} <= seen) == (route is Route.PACKED)


def test_failures_are_counted_by_cause_and_those_that_did_not_happen_are_zero():
    pair = Pair.of(config=QUIET)
    (landed,) = pair.receive()
    pair.dst.movers[0].abort(landed, "enough of this")
    pair.bench.ended([landed])
    found = scrape([pair.dst.movers[0]])
    counted = {cause: at(found, "kvmover_transfers_total", "decode", verb="receive", end=cause) for cause in CAUSES}
    assert counted == {cause: float(cause is Cause.ABORTED) for cause in CAUSES}


CAUSES = [cause for cause in Cause if cause is not Cause.FAULT]


def test_gauges_show_what_is_under_way_and_what_is_quarantined():
    pair = Pair.of(config=replace(QUIET, drain_s=0.01, route=Route.PACKED))
    (source, target), network = pair.bench.movers, pair.bench.network
    network.hold()
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.settle(lambda: source.snapshot().gauges[Gauge.WRITES_UNDER_WAY] == 25)
    found = scrape([source, target])
    assert at(found, "kvmover_outgoing_reserved_bytes") == 25 * 4096
    assert at(found, "kvmover_incoming_reserved_bytes", "decode") == 25 * 4096
    assert (at(found, "kvmover_open_sends"), at(found, "kvmover_open_receives", "decode")) == (1, 1)
    target.abort(transfers[1], "enough of this")
    pair.bench.settle(lambda: transfers[1].ended)
    found = scrape([source, target])
    assert at(found, "kvmover_incoming_quarantined_bytes", "decode") == 25 * 4096
    assert at(found, "kvmover_attempts_in_limbo", "decode") == 1
    network.deliver()
    pair.bench.settle(lambda: not target.snapshot().gauges[Gauge.ATTEMPTS_IN_LIMBO])
    found = scrape([source, target])
    for gauge in Gauge:
        if "arena" not in gauge and gauge is not Gauge.PEERS:
            assert [at(found, f"kvmover_{gauge}", engine) for engine in ("prefill", "decode")] == [0, 0], gauge


def test_ranks_of_one_process_are_told_apart():
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=QUIET)
    found = scrape(pair.bench.movers)
    peers = {key: value for key, value in found.items() if key[0] == "kvmover_peers"}
    assert {dict(labels)["engine"] + dict(labels)["rank"]: value for (_, labels), value in peers.items()} == {
        "prefill0": 1,
        "prefill1": 1,
        "decode0": 2,
    }


def test_a_snapshot_is_not_changed_by_what_happens_later():
    pair = Pair.of(config=QUIET)
    before = pair.dst.movers[0].snapshot()
    kept = deepcopy(before)
    pair.bench.ended([*pair.send(), *pair.receive()])
    assert before == kept
    assert pair.dst.movers[0].snapshot().meter != before.meter


def test_scrapes_in_the_middle_of_everything_never_see_a_count_go_down():
    with Threads.of(tokens=16) as threads:
        source, target = threads.start()
        seen: list[Samples] = []
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                seen.append(scrape([source, target]))

        looker = threading.Thread(target=look)
        looker.start()
        for n in range(25):
            sent = source.send(f"{n}", threads.pair.src_tables[0])
            landed = target.receive(f"{n}", "prefill", range(16), threads.pair.dst_tables[0])
            source.wait([sent])
            target.wait([landed])
        stop.set()
        looker.join()
        seen.append(scrape([source, target]))
    for earlier, later in pairwise(seen):
        assert earlier.keys() == later.keys()
        falling = [
            k for k, value in earlier.items() if k[0].endswith(("_total", "_bucket", "_sum")) and later[k] < value
        ]
        assert not falling
    assert at(seen[-1], "kvmover_received_bytes_total", "decode") == 25 * 16 * 1024


@given(
    st.lists(
        st.sampled_from([*OPERATION_BOUNDS_S, *(bound * 1.01 for bound in OPERATION_BOUNDS_S), 0.0, 1e4]), max_size=40
    )
)
def test_a_bucket_counts_all_that_took_no_longer_than_its_bound(times: list[float]):
    histogram = DurationHistogram(OPERATION_BOUNDS_S)
    for seconds in times:
        histogram.add(seconds)
    buckets = histogram.cumulative()
    assert [float(bound) for bound, _ in buckets] == [*OPERATION_BOUNDS_S, float("inf")]
    assert [count for _, count in buckets] == [sum(s <= float(bound) for s in times) for bound, _ in buckets]


def test_everything_that_is_counted_timed_or_gauged_has_a_metric():
    assert list(METRICS) == [*Count, *Gauge, *Stage]


def test_the_page_of_metrics_is_what_the_collectors_serve():
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run: python -m perf.metrics_page"


def test_movers_and_the_ledger_share_a_registry():
    registry = CollectorRegistry(auto_describe=True)
    registry.register(MoverCollector([metrics_page.Nothing()]))
    registry.register(LedgerCollector(Ledger()))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(MoverCollector([metrics_page.Nothing()]))


def test_the_client_is_loaded_when_somebody_scrapes():
    code = "import sys, kvmover.observe.metrics as m; m.MoverCollector([]); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"prometheus_client", "torch", "nixl"} & set(loaded.split())
