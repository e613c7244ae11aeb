"""Sums over many accounts, and histograms of times: what is kept when the accounts themselves are gone."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from kvmover.cache.ledger.account import Account, Phase
from kvmover.cache.ledger.losses import Loss

#: Upper bounds of the histograms, in seconds: a millisecond to three days and a half, by factors of four.
BOUNDS_S = tuple(0.001 * 4**power for power in range(15))


@dataclass(slots=True)
class Totals:
    """Sums over attempts. Both laws of an account hold for the sums."""

    attempts: int = 0
    finished: int = 0
    retracted: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    computed_tokens: int = 0
    abandoned_tokens: int = 0
    lost: dict[Loss, int] = field(default_factory=dict[Loss, int])

    @property
    def credited_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.storage_tokens

    @property
    def hit_rate(self) -> float:
        """Credited tokens of all prompt tokens; 0 where there are none."""
        return self.credited_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, account: Account) -> None:
        self.attempts += 1
        self.prompt_tokens += account.prompt_tokens
        self.reusable_tokens += account.reusable_tokens
        self.device_tokens += account.device_tokens
        self.host_tokens += account.host_tokens
        self.storage_tokens += account.storage_tokens
        self.computed_tokens += account.computed_tokens
        self.abandoned_tokens += account.abandoned_tokens
        for reason, tokens in account.lost.items():
            self.lost[reason] = self.lost.get(reason, 0) + tokens
        if account.phase is Phase.FINISHED:
            self.finished += 1
        elif account.phase is Phase.RETRACTED:
            self.retracted += 1
        else:
            self.aborted += 1

    def merge(self, other: Totals) -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, tokens in other.lost.items():
            self.lost[reason] = self.lost.get(reason, 0) + tokens

    def as_data(self) -> dict[str, Any]:
        """For JSON, with the sums that follow from the others."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "hit_rate": round(self.hit_rate, 6),
            "losses": {str(reason): self.lost[reason] for reason in Loss if self.lost.get(reason)},
        }


_NUMBERS = tuple(name for name in Totals.__dataclass_fields__ if name != "lost")


class Histogram:
    """Counts by upper bound, for times in seconds; the last count is of all above the last bound."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """Bound and count at or below it, as Prometheus wants them: the last bound is +Inf."""
        running, rows = 0, list[tuple[str, int]]()
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, running))
        return rows
