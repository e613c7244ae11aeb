"""A Candidate is fleets and tiers that might serve a trace; `advice` estimates KV's share of its time to first token.

The share is a request's loads from slower tiers, its wait for a wire, and its transfer. Compute and batching are left
to serving simulators, which take the table of transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvmover.errors import KvmoverError
from kvmover.layout import Component
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.advise.prefill_replay import Numbers, Prefills
from kvmover.tools.advise.transfer_table import Times, TransferTable, rank_token_bytes
from kvmover.tools.replay import ReplayConfig


class AdviseError(KvmoverError, ValueError):
    """Options without an answer: the message names the option and the value."""


@dataclass(frozen=True, slots=True)
class TierRates:
    """Bytes a microsecond (1,000 is 1 GB/s): of each rank from its host, and of each engine from storage.

    `compute_rate`: tokens a microsecond that a prefill engine computes; None leaves computing out of every share. The
    defaults are assumed: PCIe 5.0 x16, and one NVMe drive. Raises AdviseError for a rate that is not positive and
    finite.
    """

    host_rate: float = 50e3
    storage_rate: float = 5e3
    compute_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("host_rate", "storage_rate", "compute_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise AdviseError(f"a {name.replace('_', ' ')} of {value}; it must be positive")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet choice: `prefills` engines of shape `src`, `decodes` of shape `dst`, and a prefill engine's tiers.

    Raises AdviseError for fewer than one engine of each.
    """

    prefills: int
    decodes: int
    src: FleetText
    dst: FleetText
    cache: ReplayConfig

    def __post_init__(self) -> None:
        for name in ("prefills", "decodes"):
            if getattr(self, name) < 1:
                raise AdviseError(f"{getattr(self, name)} {name}; at least 1 of each is needed")

    @property
    def ranks(self) -> int:
        """Returns the GPUs of all engines."""
        return self.prefills * self.src.fleet.size + self.decodes * self.dst.fleet.size

    @property
    def price(self) -> tuple[int, int, int]:
        """Returns the key for comparison, the dearest first: GPUs, then host tokens, then storage tokens."""
        return self.ranks, self.prefills * self.cache.host_tokens, self.prefills * self.cache.storage_tokens


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The median and 99th percentile of a time over all requests, in microseconds."""

    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, times: npt.NDArray[np.float64]) -> Quantiles:
        """Compute the median, and the time that one request in a hundred exceeds."""
        middle, high = np.quantile(times, [0.5, 0.99])
        return cls(float(middle), float(high))


@dataclass(frozen=True, slots=True)
class Advice:
    """The time that KV adds to the time to first token under a candidate. `nbytes`: mean wire bytes of a request."""

    candidate: Candidate
    hit_rate: float
    nbytes: float
    load: Quantiles
    wait: Quantiles
    transfer: Quantiles
    share: Quantiles


def advice(
    candidate: Candidate, done: Prefills, table: TransferTable, components: Sequence[Component], rates: TierRates
) -> Advice:
    """Estimate a candidate: requests load hits, compute, wait for both their wires, and are sent whole. Pure."""
    load_us = _load_us(candidate, done, components, rates)
    compute_us = done.computed_tokens / rates.compute_rate if rates.compute_rate else np.zeros(len(done.tokens))
    took_us = table.us(done.tokens)
    wait_us = waits(done.arrived_us + load_us + compute_us, took_us, done.engines, candidate.decodes)
    return Advice(
        candidate,
        done.hit_rate,
        float(table.nbytes(done.tokens).mean()),
        *map(Quantiles.of, (load_us, wait_us, took_us, load_us + compute_us + wait_us + took_us)),
    )


def _load_us(candidate: Candidate, done: Prefills, components: Sequence[Component], rates: TierRates) -> Times:
    """Returns load times: each rank loads hits from the host, after the engine reads storage hits once."""
    src = candidate.src
    token_bytes = sum(src.stored(each).token_bytes / each.row_tokens for each in components if not each.states)
    of_rank = rank_token_bytes(components, src, int(done.tokens.max()))
    by_host = (done.host_tokens + done.storage_tokens) * of_rank / rates.host_rate
    return by_host + done.storage_tokens * token_bytes / rates.storage_rate


def waits(ready_us: Times, took_us: Times, engines: Numbers, decodes: int) -> Times:
    """Returns each transfer's wait for its wires: first ready, first served, one at a time at either end.

    It goes to the decode engine whose wire is free first; of equal ones, to the least recently used.

    >>> waits(np.array([0.0, 0.0, 0.0]), np.array([10.0, 10.0, 10.0]), np.array([0, 1, 0]), 1).tolist()
    [0.0, 10.0, 20.0]
    """
    free_us = [0.0] * (int(engines.max(initial=0)) + 1)
    wires = [(0.0, number) for number in range(decodes)]
    waited = np.zeros(len(ready_us))
    turn = decodes
    for n in np.argsort(ready_us, kind="stable").tolist():
        at, engine = float(ready_us[n]), int(engines[n])
        first = min(range(decodes), key=lambda wire: (max(at, wires[wire][0]), wires[wire][1]))
        begins = max(at, free_us[engine], wires[first][0])
        waited[n] = begins - at
        free_us[engine] = begins + float(took_us[n])
        wires[first] = (free_us[engine], turn)
        turn += 1
    return waited


def cheapest(found: Iterable[Advice], target_us: float) -> Advice | None:
    """Returns the cheapest advice with a 99th percentile share within `target_us`, else None; of equals the fastest."""
    able = [each for each in found if each.share.p99_us <= target_us]
    return min(able, key=lambda each: (*each.candidate.price, each.share.p99_us), default=None)


def with_pages(config: ReplayConfig, src: FleetText) -> ReplayConfig:
    """Returns the tiers in pages of the engine's size. Raises ReplayConfigError if a tier holds no page."""
    return replace(config, page_tokens=src.fleet.page_tokens)
