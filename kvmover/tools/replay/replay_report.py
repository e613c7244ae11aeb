"""A Report has the results of a replay, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvmover.cache.ledger import Loss, Residency, Totals
from kvmover.cache.prefix import WriteThrough
from kvmover.exposition import DurationHistogram
from kvmover.tools.replay.replay_config import ReplayConfig

#: Losses in any paged cache, however large.
UNAVOIDABLE = (Loss.PARTIAL_PAGE, Loss.LAST_TOKEN)

_REASONS = {
    Loss.PARTIAL_PAGE: "the page is not equal as a whole",
    Loss.LAST_TOKEN: "the last token of a prompt is always computed",
    Loss.CAPACITY_EVICTED: "given up for room",
    Loss.HOST_CAPACITY: "in storage, and no room on the host",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Sums over all requests. `seconds`: duration of the replay itself, not of the trace."""

    config: ReplayConfig
    requests: int
    totals: Totals
    seconds: float
    residency: Residency

    @property
    def ideal_hit_rate(self) -> float:
        """Returns the hit rate of a cache in pages of this size without eviction."""
        never = sum(self.totals.lost.get(reason, 0) for reason in UNAVOIDABLE)
        return (self.totals.reusable_tokens - never) / self.totals.prompt_tokens

    def as_data(self) -> dict[str, Any]:
        """Returns the configuration, the sums and the rates, for JSON."""
        totals = self.totals
        return {
            "requests": self.requests,
            "prompt_tokens": totals.prompt_tokens,
            "device_hit_tokens": totals.device_tokens,
            "host_hit_tokens": totals.host_tokens,
            "storage_hit_tokens": totals.storage_tokens,
            "computed_tokens": totals.computed_tokens,
            "hit_rate": round(totals.hit_rate, 6),
            "ideal_hit_rate": round(self.ideal_hit_rate, 6),
            "losses": totals.as_data()["losses"],
            "page_seconds": {
                "lifetime": _mean(self.residency.lifetimes),
                "idle": _mean(self.residency.idles),
                "reuse_gap": _mean(self.residency.gaps),
            },
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(totals.prompt_tokens / self.seconds),
            "requests_per_second": round(self.requests / self.seconds),
            **self.config.as_data(),
        }


def print_report(report: Report, out: Console) -> None:
    """Print the sources of the prompt tokens, the losses against the ideal, and the speed."""
    totals, config = report.totals, report.config
    capacity = "without end" if config.device_tokens is None else f"of {config.device_tokens:,} tokens"
    out.print(f"{report.requests:,} requests, {totals.prompt_tokens:,} prompt tokens")
    out.print(f"device {capacity}, pages of {config.page_tokens}, policy {config.policy.name}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "tokens", "of prompt"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    table.add_column("")

    def row(name: str, tokens: int, why: str = "") -> None:
        table.add_row(name, f"{tokens:,}", f"{tokens / totals.prompt_tokens:.2%}", why)

    row("device hits", totals.device_tokens)
    if config.host_tokens:
        row("host hits", totals.host_tokens, f"a host of {config.host_tokens:,} tokens")
    if config.storage_tokens:
        row("storage hits", totals.storage_tokens, f"storage of {config.storage_tokens:,} tokens")
    row("computed", totals.computed_tokens)
    for reason in Loss:
        if tokens := totals.lost.get(reason, 0):
            row(f"  lost: {reason}", tokens, _REASONS[reason])
    out.print(table)
    near = config.device_tokens is None or 2 * config.device_tokens > config.host_tokens
    if config.host_tokens and near and isinstance(config.writes, WriteThrough):
        out.print(
            f"a host of {config.host_tokens:,} tokens is fewer than twice the device's: it holds second copies of what"
            " is on the device, and storage is reached through what is left. Give it several times the device's, or"
            " write back"
        )
    out.print(f"hit rate {totals.hit_rate:.4f} of an ideal {report.ideal_hit_rate:.4f}")
    if totals.reusable_tokens and not report.ideal_hit_rate:
        out.print(f"no two prompts are equal for a whole page of {config.page_tokens:,} tokens: take smaller pages")
    if lived := report.residency.lifetimes.count:
        lifetime, idle = _mean(report.residency.lifetimes), _mean(report.residency.idles)
        out.print(f"a page lives {lifetime:,.0f} s, the last {idle:,.0f} s of it idle (mean of {lived:,} sampled)")
    out.print(
        f"{report.seconds:.2f} s: {report.requests / report.seconds:,.0f} requests/s,"
        f" {totals.prompt_tokens / report.seconds / 1e6:,.1f} M tokens/s"
    )


def print_reports(reports: Sequence[Report], out: Console) -> None:
    """Print the hit rates of several replays of a trace: a row for each capacity, a column for each policy."""
    first = reports[0]
    out.print(f"{first.requests:,} requests, {first.totals.prompt_tokens:,} prompt tokens")
    policies = list(dict.fromkeys(each.config.policy.name for each in reports))
    rates = {(each.config.device_tokens, each.config.policy.name): each.totals.hit_rate for each in reports}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("device tokens", *policies):
        table.add_column(heading, justify="right", no_wrap=True)
    for capacity in dict.fromkeys(each.config.device_tokens for each in reports):
        shown = "without end" if capacity is None else f"{capacity:,}"
        table.add_row(shown, *(f"{rates[capacity, policy]:.4f}" for policy in policies))
    out.print(table)
    out.print(f"hit rates in pages of {first.config.page_tokens}, of an ideal {first.ideal_hit_rate:.4f}")


def _mean(histogram: DurationHistogram) -> float:
    return round(histogram.sum_s / histogram.count, 3) if histogram.count else 0.0
