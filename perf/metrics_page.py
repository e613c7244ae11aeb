"""docs/metrics.md, written from the collectors. `python -m perf.metrics_page` updates the page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvmover.cache.ledger import Ledger, LedgerCollector, Residency
from kvmover.observe.metrics import MoverCollector
from kvmover.transfer.meter import Gauge, Meter, Snapshot

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """\
# Metrics

For Prometheus, by prometheus-client, which the extra `metrics` brings. A scrape reads what is counted anyway.

```python
from prometheus_client import REGISTRY, start_http_server

from kvmover.cache.ledger import LedgerCollector
from kvmover.observe.metrics import MoverCollector

REGISTRY.register(MoverCollector([mover]))  # a SharedMover, or several: one for each rank in this process
REGISTRY.register(LedgerCollector(ledger))
start_http_server(9400)
```

Histograms have buckets from 10 us to 84 s in powers of two. Failures are `kvmover_transfers_total` whose `end` is not
`landed`: `deadline` is what expired. This page is written by `python -m perf.metrics_page`.
"""


class Nothing:
    """A mover that has done nothing."""

    def snapshot(self) -> Snapshot:
        return Snapshot("engine", 0, Meter(), dict.fromkeys(Gauge, 0))


def page() -> str:
    movers = table(MoverCollector([Nothing()]).collect())
    ledger = table(LedgerCollector(Ledger(), {"device": Residency()}).collect())
    return "\n".join([HEAD, "## Movers", "", *movers, "", "## The hit ledger", "", *ledger, ""])


def table(families: Iterable[Any]) -> list[str]:
    """Rows of a Markdown table, a metric each."""
    rows = ["| metric | type | labels | what it says |", "|---|---|---|---|"]
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in family._labelnames)
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")
