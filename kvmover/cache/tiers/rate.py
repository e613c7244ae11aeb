"""A Rate says how many bytes a second a kind of work may move; its Bucket fills with time. Pure; `now` is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvmover.cache.tiers.errors import TierError


@dataclass(frozen=True, slots=True)
class Rate:
    """`bytes_per_s` in the long run, and as much as `burst_bytes` at once after a pause."""

    bytes_per_s: float
    burst_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.burst_bytes < 1:
            raise TierError(f"a rate of {self.bytes_per_s} bytes a second and bursts of {self.burst_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Bucket:
    """What may be moved at `at_s`. Work is done whole and paid afterwards: below 0 there is nothing until it is repaid,
    so that a batch above the burst moves too.

    >>> bucket = Bucket.full(Rate(1000.0, 500), 0.0).spent(2500, 0.0)
    >>> bucket.wait_s(0.0), bucket.wait_s(1.5), bucket.wait_s(9.0)
    (2.0, 0.5, 0.0)
    """

    rate: Rate
    level_bytes: float
    at_s: float

    @classmethod
    def full(cls, rate: Rate, now_s: float) -> Bucket:
        return cls(rate, rate.burst_bytes, now_s)

    def filled(self, now_s: float) -> Bucket:
        """A clock that goes backwards takes nothing away."""
        come = max(0.0, now_s - self.at_s) * self.rate.bytes_per_s
        return replace(self, level_bytes=min(self.rate.burst_bytes, self.level_bytes + come), at_s=now_s)

    def wait_s(self, now_s: float) -> float:
        """How long until work may begin."""
        return max(0.0, -self.filled(now_s).level_bytes / self.rate.bytes_per_s)

    def spent(self, nbytes: int, now_s: float) -> Bucket:
        filled = self.filled(now_s)
        return replace(filled, level_bytes=filled.level_bytes - nbytes)
