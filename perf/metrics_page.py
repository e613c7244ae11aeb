"""docs/metrics.md, written from the collectors. `python -m perf.metrics_page` updates the page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvmover.cache.hints import PinCollector, PinLimits, Pins
from kvmover.cache.ledger import Ledger, LedgerCollector, Residency
from kvmover.cache.prefix import FULL, PrefixTree
from kvmover.cache.tiers import TierCollector
from kvmover.observe.metrics import MoverCollector
from kvmover.store import KeeperCollector, KeeperSnapshot, PageStore, StoreCollector
from kvmover.store.keeper.keeper_metrics import KeeperCounts
from kvmover.transfer.meter import Gauge, Meter, Snapshot
from perf.command_line import options

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """\
# Metrics

kvmover exports these metrics through prometheus-client, which the extra `metrics` installs. A scrape reads counters
that are kept anyway. In vLLM and SGLang `KVMOVER_METRICS_PORT=24400` is enough: rank r serves port 24400 + r, and
vLLM's scheduler, with the hit ledger, the port behind those of its ranks. Where a port is taken, a warning names it and
the server starts without that endpoint. The label `engine` is `engine_id` of vLLM's `--kv-transfer-config`, or without
it a new UUID at each start; in SGLang it is address, HTTP port and data-parallel rank.

```python
from prometheus_client import REGISTRY, start_http_server

from kvmover.cache.ledger import LedgerCollector
from kvmover.observe.metrics import MoverCollector

REGISTRY.register(MoverCollector([mover]))  # a SharedMover, or several: one for each rank in this process
REGISTRY.register(LedgerCollector(ledger))
start_http_server(24400)
```

Tiers have a `TierCollector(controller.snapshot)`, a page store a `StoreCollector(store, engine, rank)`. In SGLang and
vLLM each store is served at its rank's port, the one of vLLM's tier at the scheduler's. `kvmover keeper` serves its
metrics with `--metrics-port 24490`, and says at `/healthz` whether its loop goes round. Histograms have buckets from
10 us to 84 s in powers of two. Failed transfers are those of `kvmover_transfers_total` whose `end` is not `landed`;
`end="deadline"` counts the ones that ran out of time, `end="unbegun"` those of which no transfer was made, since nobody
was found or they were refused. What asks for nothing, to let a source forget a request, is no transfer. This page is
written by `python -m perf.metrics_page`.
"""


class Nothing:
    """A mover that has done nothing."""

    def snapshot(self) -> Snapshot:
        return Snapshot("engine", 0, Meter(), dict.fromkeys(Gauge, 0))


def page() -> str:
    movers = table(MoverCollector([Nothing()]).collect())
    ledger = table(LedgerCollector(Ledger(), {"device": Residency()}).collect())
    tiers = table(TierCollector().collect())
    pins = table(PinCollector(Pins(PrefixTree(1), {FULL: 1}, PinLimits())).collect())
    store = table(StoreCollector(PageStore.open("keeper:///nowhere", None), "engine", 0).collect())
    keeper = table(KeeperCollector(lambda: KeeperSnapshot(0.0, KeeperCounts())).collect())
    kept = (("Page stores", store), ("Keepers", keeper))
    parts = (("Movers", movers), ("The hit ledger", ledger), ("Tiers", tiers), ("Pins", pins), *kept)
    return "\n".join([HEAD, *(line for name, rows in parts for line in (f"## {name}", "", *rows, ""))])


def table(families: Iterable[Any]) -> list[str]:
    """Rows of a Markdown table, a metric each."""
    rows = ["| metric | type | labels | what it says |", "|---|---|---|---|"]
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in family._labelnames)
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return rows


if __name__ == "__main__":
    options(__doc__).parse_args()
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")
