"""RequestAccounts keeps a ledger of vLLM's requests: each prompt token was a hit, in some tier, or was computed.

Its sources are the calls of vLLM's scheduler to a connector. Hits that a larger cache would have had are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvmover.cache.hints import HintAnswer, PinCollector, PinGauges
from kvmover.cache.ledger import (
    Account,
    AccountGroup,
    AttemptPhase,
    Credit,
    FaultPolicy,
    Ledger,
    LedgerCollector,
    LedgerError,
    Loss,
)
from kvmover.engines.common import TenantGroups, hints_of, outcome_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass(frozen=True, slots=True)
class ExternalTokens:
    """A connector's tokens by their place. `peer`: in another engine, of an earlier turn; `elsewhere`: in the engine
    that computed them for this request, or an unknown place.
    """

    host: int = 0
    storage: int = 0
    elsewhere: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        """Returns the sum."""
        return self.host + self.storage + self.elsewhere + self.peer


@dataclass(slots=True)
class Promised:
    """The tokens promised to an attempt that has not begun: `device` tokens in vLLM's own prefix cache, and external
    ones behind them. `unread`: tokens of an earlier promise that did not come. `cached`: all tokens found at the first
    answer to vLLM.
    """

    prompt: int
    device: int
    external: ExternalTokens = ExternalTokens()
    unread: int = 0
    cached: int | None = None


class RequestAccounts:
    """The ledger's input from vLLM's scheduler. `collect` is for any thread. Requests are vLLM's, and are only read.

    An attempt counts from the first step that computes a part of it: only then are promised tokens present or lost. A
    request whose KV another engine computed is only in that engine's account, so no token counts twice.
    """

    def __init__(
        self, group: AccountGroup, sink: Callable[[Account], object], clock: Callable[[], float] = time.time
    ) -> None:
        self.ledger = Ledger(FaultPolicy.COUNT, sink=sink)
        self._groups, self._clock = TenantGroups(group), clock
        self._requests: dict[str, Any] = {}
        self._promised: dict[str, Promised] = {}
        self._lock = Lock()
        #: The pins of hints, if hints are supported.
        self.pins: PinGauges | None = None

    def matched(self, request: Any, device: int, external: int | None) -> None:
        """Note that vLLM found the first `device` tokens in its prefix cache, and the connector `external` behind them
        (None: not known yet). vLLM may ask again.
        """
        before = self._promised.get(request.request_id)
        unread = before.unread + before.external.total if before else 0
        cached = before.cached if before else None
        if cached is None and external is not None:
            cached = device + external
        self._requests[request.request_id] = request
        self._promised[request.request_id] = Promised(request.num_tokens, device, unread=unread, cached=cached)

    def allocated(self, request: Any, external: ExternalTokens) -> None:
        """Note the tokens being loaded behind those on the device, for a request that was `matched`. A total of 0 and
        an unknown request change nothing.
        """
        known = self._promised.get(request.request_id)
        if known and external.total:
            known.external = external

    def scheduled(self, output: Any) -> None:
        """Account for a step. `num_computed_tokens` of requests are still those before the step."""
        with self._lock:
            now = self._clock()
            for name in output.preempted_req_ids or ():
                if self._phase(name) is AttemptPhase.ADMITTED:
                    self.ledger.retracted(name, now)
            for name, count in output.num_scheduled_tokens.items():
                if name not in self._requests:
                    continue
                start = self._requests[name].num_computed_tokens
                if name in self._promised:
                    self._admit(name, self._promised.pop(name), start, now)
                if self._phase(name) is AttemptPhase.ADMITTED:
                    prompt = self.ledger.account(name).prompt_tokens
                    self.ledger.computed(name, max(0, min(start + count, prompt) - start))

    def finished(self, request: Any) -> None:
        """Close a request's account: as finished if its prompt was computed, else as aborted."""
        name = request.request_id
        self._requests.pop(name, None)
        self._promised.pop(name, None)
        with self._lock:
            if self._phase(name) is None:
                return
            account = self.ledger.account(name)
            is_whole = account.credited_tokens + account.computed_tokens == account.prompt_tokens
            if is_whole and account.phase is AttemptPhase.ADMITTED:
                self.ledger.finished(name, self._clock())
            else:
                self.ledger.aborted(name, self._clock())

    def hinted(self, request: Any, kind: str, answer: HintAnswer) -> None:
        """Count a hint of a request that was met or refused."""
        group = self._groups.of(hints_of(request.kv_transfer_params, request.request_id).kvmover_tenant)
        with self._lock:
            self.ledger.hinted(kind, outcome_of(answer), group)

    def collect(self) -> Iterator[Family]:
        """Returns the metric families of the ledger and of pins, for prometheus_client."""
        with self._lock:
            found = list(LedgerCollector(self.ledger).collect())
        return iter([*found, *(PinCollector(self.pins).collect() if self.pins is not None else ())])

    def _admit(self, name: str, promised: Promised, start: int, now: float) -> None:
        """Credit the tokens below `start`, which are on the device, to their tiers.

        Of promised tokens beyond, the last of a prompt is computed for its logits. The rest did not come; since vLLM
        does not name their tier, the farthest one lost them.
        """
        external = promised.external
        if external.elsewhere:
            return
        device = max(promised.device, start - external.total) if start >= promised.device else start
        host = min(external.host, start - device)
        storage = start - device - host if external.peer == 0 else min(external.storage, start - device - host)
        credit = Credit(device, host, storage, start - device - host - storage)
        missing = promised.device + external.total - start
        reason = Loss.LAST_TOKEN if missing == 1 and start == promised.prompt - 1 else Loss.READ_FAILED
        lost = {reason: missing} if missing > 0 else {}
        unread = min(promised.unread, promised.prompt - start - sum(lost.values()))
        if unread > 0:
            lost[Loss.READ_FAILED] = lost.get(Loss.READ_FAILED, 0) + unread
        hints = hints_of(self._requests[name].kv_transfer_params, name)
        group = self._groups.of(hints.kvmover_tenant)
        is_first = self._phase(name) is None
        self.ledger.matched(name, promised.prompt, start + sum(lost.values()), now, group)
        if is_first:
            cached = promised.device if promised.cached is None else promised.cached
            self.ledger.predicted(name, hints.prediction(promised.prompt, cached))
        self.ledger.admitted(name, credit, lost)

    def _phase(self, name: str) -> AttemptPhase | None:
        try:
            return self.ledger.account(name).phase
        except LedgerError:
            return None
