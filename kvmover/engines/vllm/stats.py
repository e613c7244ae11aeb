"""The connector counts in the shape of vLLM's log lines and Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvmover.engines.vllm import engine

#: Names of what is counted, by what it is, as Prometheus shows it. Requests count once, whatever the number of ranks;
#: bytes and blocks are those of all ranks together.
COUNTS = {
    "sent_requests": "Requests whose KV another engine fetched, from every rank.",
    "sent_failures": "Requests whose KV was not fetched to the end, from one rank or more.",
    "sent_bytes": "Bytes of KV that other engines fetched, from all ranks together.",
    "sent_microseconds": "Microseconds from offering a request to its end on the slowest rank.",
    "received_requests": "Requests whose KV came from another engine, to every rank.",
    "received_failures": "Requests whose KV did not come, or not all of it, to one rank or more.",
    "received_bytes": "Bytes of KV that came from other engines, to all ranks together.",
    "received_microseconds": "Microseconds from asking for a request to its end on the slowest rank.",
    "stored_blocks": "Blocks that are in the page store, by a rank or before it, once a rank.",
    "failed_stores": "Blocks that could not be stored, once a rank.",
    "loaded_blocks": "Blocks read from the page store, once a rank.",
    "failed_loads": "Blocks that could not be read from the page store, once a rank.",
}


class KvmoverStats(engine.Stats):
    """Counts of an interval: `data` by the names of COUNTS, of ranks and of the scheduler, which vLLM adds up."""

    def reset(self) -> None:
        """Begin an interval: every count is 0."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KvmoverStats) -> KvmoverStats:
        """Add the counts of another rank or step to these."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line for people: times in milliseconds a request, bytes in MB, zeros left out."""
        line: dict[str, int | float] = {}
        for way in ("sent", "received"):
            requests = self.data.get(f"{way}_requests", 0)
            if requests:
                line[f"{way} requests"] = requests
                line[f"{way} MB"] = round(self.data.get(f"{way}_bytes", 0) / 1e6, 3)
                line[f"{way} ms a request"] = round(self.data.get(f"{way}_microseconds", 0) / 1e3 / requests, 3)
        rest = ("sent_failures", "received_failures", "stored_blocks", "failed_stores", "loaded_blocks", "failed_loads")
        return line | {name.replace("_", " "): self.data[name] for name in rest if self.data.get(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted, so that vLLM logs no line."""
        return not any(self.data.values())


class KvmoverMetrics(engine.PromMetrics):
    """`vllm:kvmover_*_total`, a counter a name of COUNTS."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        engine.PromMetrics.__init__(self, vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: engine.per_engine(
                self._counter_cls(name=f"vllm:kvmover_{name}", documentation=text, labelnames=labelnames), per_engine
            )
            for name, text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        """Add an interval's counts, by the names of COUNTS, to those of engine `engine_idx`."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
