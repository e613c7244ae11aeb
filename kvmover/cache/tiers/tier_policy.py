"""A TierPolicy says which pages are written to storage and read from it, how fast, and how long a request waits. Pure.

The tree chooses the pages that go to the host: `prefix.WriteThrough(after_hits)` (through, or selective by hits) or
`prefix.WriteBack` (on eviction). A rate is a bucket that fills with time; `now` is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from kvmover.errors import TierError
from kvmover.fields import settle


class Store(Enum):
    """The time at which pages go from host to storage.

    BACKED: with their copy to the host, or on eviction if the tree writes back. REUSED: when the host's copy is loaded.
    """

    BACKED = "backed"
    REUSED = "reused"
    NEVER = "never"


class Inclusion(Enum):
    """A choice if a loaded page stays on the host too.

    INCLUSIVE: if the tree writes back, second copies are evicted first. EXCLUSIVE, for such a tree alone: they go once
    no operation is open.
    """

    INCLUSIVE = "inclusive"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True, slots=True)
class Speed:
    """A tier's speed: `latency_s` for a batch, and then `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of one batch."""
        return self.latency_s + nbytes / self.bytes_per_s

    def within(self, rate: Rate | None) -> Speed:
        """Return the speed under a rate limit."""
        return self if rate is None else replace(self, bytes_per_s=min(self.bytes_per_s, rate.bytes_per_s))


def worth(tokens: int, token_bytes: int, prefill_tokens_per_s: float, *way: Speed) -> float:
    """Return the seconds gained by fetching `tokens` over the tiers of `way` in sequence, not computing them.

    Llama-3-70B, 81,920 bytes a token on each of four ranks; prefill of 8,000 tokens/s. 4,096 tokens from a disk of 2
    GB/s and 2 ms, then over a link of 20 GB/s: 0.512 s of prefill against 0.170 + 0.017 s. From a disk of 0.5 GB/s,
    0.690 s: computing is faster.

    >>> link = Speed(0.0, 20e9)
    >>> [round(worth(4096, 81920, 8000, Speed(0.002, rate), link), 3) for rate in (2e9, 0.5e9)]
    [0.325, -0.178]
    """
    return tokens / prefill_tokens_per_s - sum(speed.seconds(tokens * token_bytes) for speed in way)


@dataclass(frozen=True, slots=True)
class BestEffort:
    """A prefetch policy: a read goes on until its request is to start."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A prefetch policy: a read goes on to its end."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """A prefetch policy: a read ends at `base_s + tokens / 1024 * per_ki_token_s` s after its restore's beginning.

    Raises TierError for a time below 0.
    """

    base_s: float = 1.0
    per_ki_token_s: float = 0.25

    def __post_init__(self) -> None:
        if self.base_s < 0 or self.per_ki_token_s < 0:
            raise TierError(f"a timeout of {self.base_s} s and {self.per_ki_token_s} s for 1,024 tokens")


@dataclass(frozen=True, slots=True)
class CostAware:
    """A prefetch policy: a read must be expected to beat the prefill that it spares, and has its time.

    Without measured speeds a read is begun. Raises TierError unless the prefill is above 0.
    """

    prefill_tokens_per_s: float

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise TierError(f"a prefill of {self.prefill_tokens_per_s} tokens a second")


Prefetch: TypeAlias = BestEffort | Wait | Timeout | CostAware


def pays(policy: Prefetch, tokens: int, token_bytes: int, way: tuple[Speed, ...]) -> bool:
    """Return True if a read is to begin."""
    if isinstance(policy, CostAware) and way:
        return worth(tokens, token_bytes, policy.prefill_tokens_per_s, *way) > 0
    return True


def patience_s(policy: Prefetch, tokens: int) -> float | None:
    """Return the most seconds of a read of `tokens`; None if unlimited."""
    if isinstance(policy, Timeout):
        return policy.base_s + tokens / 1024 * policy.per_ki_token_s
    return tokens / policy.prefill_tokens_per_s if isinstance(policy, CostAware) else None


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """The thresholds and limits of a controller. Raises TierError for values out of range.

    `least_tokens`: fewer are not asked of peers and storage. `least_load_tokens`: fewer stay on the host.
    `reading_share`: of host pages, for reads, in (0, 1]. `writing_pages`: the most that may wait to be written; more
    are dropped. `read_rate`, `write_rate`: of storage, for this rank.
    """

    store: Store = Store.BACKED
    prefetch: Prefetch = Timeout()
    least_tokens: int = 256
    least_load_tokens: int = 10
    reading_share: float = 0.5
    writing_pages: int = 65536
    read_rate: Rate | None = None
    write_rate: Rate | None = None
    inclusion: Inclusion = Inclusion.INCLUSIVE

    def __post_init__(self) -> None:
        if min(self.least_tokens, self.least_load_tokens, self.writing_pages) < 0 or not 0 < self.reading_share <= 1:
            raise TierError(f"thresholds below 0, or a share that is not within 0 and 1: {self}")
        settle(self, "policy", TierError, store=Store, inclusion=Inclusion)


@dataclass(slots=True)
class ThroughputEstimator:
    """An estimator of a Speed: a line through (bytes, seconds) by least squares, older batches weighing less.

    >>> reads = ThroughputEstimator()
    >>> for mib in (1, 2, 4, 8):
    ...     reads.add(mib << 20, 0.002 + (mib << 20) / 2e9)
    >>> speed = reads.speed()
    >>> round(speed.latency_s, 6), round(speed.bytes_per_s / 1e9, 3)
    (0.002, 2.0)
    """

    keep: float = 0.95
    count: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a batch."""
        for name, value in (
            ("count", 1.0),
            ("nbytes", nbytes),
            ("seconds", seconds),
            ("squares", float(nbytes) ** 2),
            ("products", nbytes * seconds),
        ):
            setattr(self, name, getattr(self, name) * self.keep + value)

    def speed(self) -> Speed | None:
        """Return the fit; None before the first batch. Latency is 0 where sizes do not show one."""
        if not self.nbytes or not self.seconds:
            return None
        spread = self.count * self.squares - self.nbytes**2
        slope = (self.count * self.products - self.nbytes * self.seconds) / spread if spread > 0 else 0.0
        latency = (self.seconds - slope * self.nbytes) / self.count
        if slope <= 0 or latency <= 0 or spread <= 1e-9 * self.nbytes**2:
            return Speed(0.0, self.nbytes / self.seconds)
        return Speed(latency, 1 / slope)


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit of `bytes_per_s` in the long run, and of `burst_bytes` at once. Raises TierError unless both are
    positive.
    """

    bytes_per_s: float
    burst_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.burst_bytes < 1:
            raise TierError(f"a rate of {self.bytes_per_s} bytes a second and bursts of {self.burst_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Bucket:
    """The bytes that may be moved at `at_s`. Work is paid afterwards, and begins at levels from 0.

    >>> bucket = Bucket.full(Rate(1000.0, 500), 0.0).spent(2500, 0.0)
    >>> bucket.wait_s(0.0), bucket.wait_s(1.5), bucket.wait_s(9.0)
    (2.0, 0.5, 0.0)
    """

    rate: Rate
    level_bytes: float
    at_s: float

    @classmethod
    def full(cls, rate: Rate, now_s: float) -> Bucket:
        """Return a bucket with a whole burst."""
        return cls(rate, rate.burst_bytes, now_s)

    def filled(self, now_s: float) -> Bucket:
        """Return the bucket at `now_s`; its level never falls."""
        come = max(0.0, now_s - self.at_s) * self.rate.bytes_per_s
        return replace(self, level_bytes=min(self.rate.burst_bytes, self.level_bytes + come), at_s=now_s)

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until work may begin."""
        return max(0.0, -self.filled(now_s).level_bytes / self.rate.bytes_per_s)

    def spent(self, nbytes: int, now_s: float) -> Bucket:
        """Return the bucket after `nbytes` were moved."""
        filled = self.filled(now_s)
        return replace(filled, level_bytes=filled.level_bytes - nbytes)
