"""RadixAccounts enters the requests of SGLang's radix cache into kvmover's ledger, which is served at /metrics.

SGLang calls its cache when it looks a request up, gives it pages, keeps its KV, and takes its pages back.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from kvmover.cache.ledger import AccountGroup, Credit, FaultPolicy, Ledger, LedgerCollector, Loss
from kvmover.config import load
from kvmover.engines.common import ParallelRank, TenantGroups, hints_of
from kvmover.engines.sglang import engine_radix, sglang_api
from kvmover.observe.logs import Guest
from kvmover.observe.observers import Observers
from kvmover.store import StoreCollector

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from kvmover.cache.hints import PinCollector
    from kvmover.cache.tiers import TierCollector
    from kvmover.config import Settings


@dataclass(slots=True)
class Lookup:
    """The tokens that a request asked for and found, on device and host.

    `last_page_tokens`: found but computed, as their page has the prompt's last token. `left`: tokens that storage has
    and did not bring, by reason.
    """

    prompt_tokens: int
    found_tokens: int = 0
    last_page_tokens: int = 0
    left: Mapping[Loss, int] = field(default_factory=dict[Loss, int])


@dataclass(slots=True)
class _Attempt:
    """A request's admission. `prefix_tokens`: its prefix, None while it waits.

    `concurrent_tokens`: see `Ledger.finished`.
    """

    lookup: Lookup
    prefix_tokens: int | None = None
    concurrent_tokens: int = 0


class RadixAccounts:
    """The ledger of a rank's requests, for the scheduler's thread; another thread scrapes it between two calls.

    An event that does not balance is counted (`Ledger.faults`), and fails no request.
    """

    def __init__(self, model: str, settings: Settings, place: ParallelRank) -> None:
        """Serve metrics and keep the run log if `settings` ask for them. Raises KvmoverError."""
        speaker = Guest(logging.getLogger(), f"kvmover radix cache rank {place.number} of {place.grid}")
        self._observers = Observers(settings, model, place.number, speaker)
        self.ledger = Ledger(FaultPolicy.COUNT, sink=self._observers.account)
        self._groups = TenantGroups(AccountGroup(model=model))
        self._attempts: dict[str, _Attempt] = {}
        self._lock = Lock()
        self._beside: list[TierCollector | PinCollector | StoreCollector] = []
        self._observers.serve(self)

    def close(self) -> None:
        """End the endpoint and the run log."""
        self._observers.close()

    def collect(self) -> list[Family]:
        """Returns the families of the ledger and of the tiers, for prometheus_client."""
        with self._lock:
            found = list(LedgerCollector(self.ledger).collect())
        return [*found, *(family for collector in self._beside for family in collector.collect())]

    def show(self, *collectors: TierCollector | PinCollector | StoreCollector) -> None:
        """Serve the families of these too."""
        self._beside += collectors

    def matched(self, request: str, lookup: Lookup, params: object = None) -> None:
        """Record a look-up of a waiting request; its last look-up before admission counts.

        `params`: the request's own, with a router's expectation, if any. Else the first look-up is the expectation of a
        router that has read every event.
        """
        attempt = self._attempts.get(request)
        if attempt is not None and attempt.prefix_tokens is not None:
            return
        self._attempts[request] = _Attempt(lookup)
        reusable = lookup.found_tokens + lookup.last_page_tokens + sum(lookup.left.values())
        if attempt is not None:
            with self._lock:
                self.ledger.matched(request, lookup.prompt_tokens, reusable, time.time())
            return
        hints = hints_of(params, request)
        group = self._groups.of(hints.kvmover_tenant)
        with self._lock:
            self.ledger.matched(request, lookup.prompt_tokens, reusable, time.time(), group)
            self.ledger.predicted(request, hints.prediction(lookup.prompt_tokens, lookup.found_tokens))

    def admitted(self, request: str, credit: Credit, why: Loss = Loss.THRESHOLD) -> None:
        """Record that the request has pages behind its prefix; `why`: the reason for found tokens that it lacks.

        Calls for later chunks are ignored.
        """
        attempt = self._attempts.get(request)
        if attempt is None or attempt.prefix_tokens is not None:
            return
        prefix = attempt.prefix_tokens = credit.tokens
        lookup = attempt.lookup
        lost = Counter({Loss.LAST_TOKEN: lookup.last_page_tokens, why: lookup.found_tokens - prefix})
        lost.update(lookup.left)
        with self._lock:
            self.ledger.admitted(request, credit, {reason: count for reason, count in lost.items() if count})

    def concurrent(self, request: str, tokens: int) -> None:
        """Count `tokens` of the prompt that the request computed although another request had kept them by then."""
        attempt = self._attempts.get(request)
        if attempt is not None:
            attempt.concurrent_tokens += tokens

    def answered(self, request: str) -> None:
        """Record the request's regular end: all of its prompt was found or computed."""
        attempt = self._attempts.pop(request, None)
        if attempt is None or attempt.prefix_tokens is None:
            return
        lookup, computed = attempt.lookup, attempt.lookup.prompt_tokens - attempt.prefix_tokens
        # Tokens found but not used, and those that storage or a peer did not bring, are lost already.
        known = lookup.found_tokens + lookup.last_page_tokens - attempt.prefix_tokens + sum(lookup.left.values())
        concurrent = max(0, attempt.concurrent_tokens - known)
        with self._lock:
            self.ledger.computed(request, computed)
            self.ledger.finished(request, time.time(), min(concurrent, computed))

    def retracted(self, request: str, done_tokens: int) -> None:
        """Record that the request gave its pages back and waits again, with `done_tokens` found or computed."""
        attempt = self._attempts.get(request)
        if attempt is None or attempt.prefix_tokens is None:
            return
        self._attempts[request] = _Attempt(attempt.lookup)
        with self._lock:
            self.ledger.computed(request, _computed(attempt, done_tokens))
            self.ledger.retracted(request, time.time())

    def aborted(self, request: str, done_tokens: int = 0) -> None:
        """Record the request's end without an answer, waiting or running. A request that has ended is ignored."""
        attempt = self._attempts.pop(request, None)
        if attempt is None:
            return
        with self._lock:
            if attempt.prefix_tokens is not None:
                self.ledger.computed(request, _computed(attempt, done_tokens))
            self.ledger.aborted(request, time.time())

    def hinted(self, kind: str, outcome: str, params: object) -> None:
        """Record the outcome of a hint. `params`: the request's own, which name its tenant."""
        group = self._groups.of(hints_of(params, kind).kvmover_tenant)
        with self._lock:
            self.ledger.hinted(kind, outcome, group)


def _computed(attempt: _Attempt, done_tokens: int) -> int:
    return max(0, min(done_tokens, attempt.lookup.prompt_tokens) - (attempt.prefix_tokens or 0))


def accounts_of() -> RadixAccounts | None:
    """Returns a ledger if the settings publish it, by run log or metrics, else None.

    None also in a prefill or decode, which has metrics of its own.
    """
    settings = load().settings
    if (settings.record.run_log is None and settings.metrics.port is None) or engine_radix.disaggregated():
        return None
    return RadixAccounts(sglang_api.served_name(), settings, engine_radix.place())
