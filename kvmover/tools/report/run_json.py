"""A Summary as JSON, for `kvmover report --json`: the numbers of its tables, in seconds, bytes and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmover.cache.ledger import Totals
from kvmover.observe.runlog import Moved
from kvmover.tools.report.run_summary import Summary, quantile, route_of


def summary_as_data(summary: Summary, cut: int) -> dict[str, Any]:
    """Returns the sums of a run, its slowest and its failed requests. `cut`: unfinished lines of its logs."""
    return {
        "began_s": summary.began_s,
        "seconds": summary.ended_s - summary.began_s,
        "ranks": len(summary.ranks),
        "unfinished_lines": cut,
        "landed": summary.landed,
        "failed": summary.causes.total(),
        "received_bytes": summary.received_bytes,
        "receive_seconds": _quantiles(summary.received_s),
        "causes": dict(summary.causes.most_common()),
        "slowest": [_transfer(line, summary) for _, _, line in sorted(summary.slowest, reverse=True)],
        "failures": [
            {**_transfer(line, summary), "reason": reason, "cause": str(line.cause or "unknown"), "transfers": count}
            for (_, reason), (line, count) in reversed(summary.failed.items())
        ],
        "ways_s": dict(sorted(summary.ways_s.items(), key=lambda each: -each[1])),
        "parts": {str(part): _quantiles(spent_s) for part, spent_s in summary.parts_s.items() if spent_s},
        "tokens": [
            {"tenant": group.tenant, "model": group.model, **_tokens(total)} for group, total in summary.tokens.items()
        ],
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    found = {name: quantile(seconds, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {"transfers": len(seconds), "sum": sum(seconds), **found, "most": quantile(seconds, 1.0)}


def _transfer(line: Moved, summary: Summary) -> dict[str, Any]:
    return {
        "request": line.request,
        "engine": line.engine,
        "rank": line.rank,
        "verb": line.verb,
        "route": route_of(line),
        "asked_at_s": line.began_s - summary.began_s,
        "seconds": line.seconds,
        "bytes": line.nbytes,
        "chunks": line.writes,
        "resent": line.resent,
    }


def _tokens(total: Totals) -> dict[str, Any]:
    return {
        "prompt": total.prompt_tokens,
        "device": total.device_tokens,
        "host": total.host_tokens,
        "storage": total.storage_tokens,
        "peer": total.peer_tokens,
        "computed": total.computed_tokens,
        "lost": {str(reason): count for reason, count in total.lost.items() if count},
    }
