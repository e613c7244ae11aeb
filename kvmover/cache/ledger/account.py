"""An Account states the fate of every prompt token of one attempt of a request. It is frozen when the attempt ends.

Two laws hold, and a step that would break one raises LedgerError and changes no account:

    reusable = device + host + storage + peer + lost, over all reasons      from admission on
    prompt   = device + host + storage + peer + computed + abandoned        when the attempt has ended

`abandoned` tokens were never reached by an attempt that was aborted or retracted; 0 if it finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from kvmover.errors import KvmoverError


class Loss(StrEnum):
    """The reasons of a loss, in the order in which a request meets them: the first that applies counts."""

    #: Computed before, and not given to a tier: below a write threshold, or not cached by choice.
    NEVER_WRITTEN = "never_written"
    #: Evicted from a tier for room.
    CAPACITY_EVICTED = "capacity_evicted"
    #: Computed at the same time by another request, or inserted by it before this one could.
    CONCURRENT = "concurrent"
    #: Equal tokens in a page that is not equal as a whole.
    PARTIAL_PAGE = "partial_page"
    #: The last token of a prompt, always computed for its logits, and the rest of its page.
    LAST_TOKEN = "last_token"
    #: Held for attention, and missing in another component (sliding window, state).
    COMPONENT_MISSING = "component_missing"
    #: Missing on another rank that must load the same request.
    RANK_MINIMUM = "rank_minimum"
    #: Too few to be worth a transfer.
    THRESHOLD = "threshold"
    #: In storage, without room in host memory to read them into.
    HOST_CAPACITY = "host_capacity"
    #: In a slower tier, without room on the device to load them into.
    DEVICE_CAPACITY = "device_capacity"
    #: Their source was pinned by another transfer.
    BUSY = "busy"
    #: The read was not done when the request had to start.
    LATE = "late"
    #: Reported by storage, which could not read them.
    READ_FAILED = "read_failed"
    #: Read with another digest than was written.
    POISONED = "poisoned"
    #: The copy to the device failed.
    LOAD_FAILED = "load_failed"


class Predictor(StrEnum):
    """The source of a prediction of how much of a prompt is cached."""

    #: The request's sender, by its knowledge of this engine.
    ROUTER = "router"
    #: The cache itself, when the request came: as a router knows that has read every event.
    INVENTORY = "inventory"


RequestId: TypeAlias = str | int
Losses: TypeAlias = Mapping[Loss, int]

NOTHING_LOST: Losses = MappingProxyType({})


class LedgerError(KvmoverError, ValueError):
    """An account that would not balance, or an event out of order: the message names the request and the numbers."""


class AttemptPhase(StrEnum):
    """The phase of an attempt. The last three are ends."""

    WAITING = "waiting"
    MATCHED = "matched"
    ADMITTED = "admitted"
    FINISHED = "finished"
    RETRACTED = "retracted"
    ABORTED = "aborted"


#: Phases that imply an admission. An abort may come before.
_WERE_ADMITTED = (AttemptPhase.ADMITTED, AttemptPhase.FINISHED, AttemptPhase.RETRACTED)


class AccountGroup(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """A group whose accounts are summed. Keep tenants few: each is a time series of every metric."""

    tenant: str = ""
    model: str = ""


class Credit(msgspec.Struct, frozen=True, gc=False):
    """Tokens whose KV is on the device, each counted once, by the tier from which it came there.

    `peer_tokens` came from another engine, which had computed them for another request.
    """

    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    peer_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The sum of all tiers."""
        return self.device_tokens + self.host_tokens + self.storage_tokens + self.peer_tokens

    @property
    def least_tokens(self) -> int:
        """The least of the tiers' tokens: below 0 the credit is invalid."""
        return min(self.device_tokens, self.host_tokens, self.storage_tokens, self.peer_tokens)


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """A prediction of a prompt's hits, in tokens over all tiers, and its source."""

    tokens: int
    by: Predictor


class Account(msgspec.Struct, frozen=True, gc=False):
    """An attempt. Attempts count from 1, at admission; matching again does not count.

    A waiting request has the number of its attempts before, 0 at first.
    """

    request: RequestId
    group: AccountGroup
    attempt: int
    phase: AttemptPhase
    began_s: float
    ended_s: float
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    peer_tokens: int = 0
    computed_tokens: int = 0
    abandoned_tokens: int = 0
    lost: dict[Loss, int] = {}
    prediction: Prediction | None = None

    @property
    def credited_tokens(self) -> int:
        """Tokens on the device without being computed, from any tier."""
        return self.device_tokens + self.host_tokens + self.storage_tokens + self.peer_tokens

    @property
    def lost_tokens(self) -> int:
        """Reusable tokens that are not on the device, over all reasons."""
        return sum(self.lost.values())

    def check(self) -> None:
        """Raise LedgerError if a law that holds at this phase is broken. O(reasons)."""
        if self.phase in _WERE_ADMITTED and self.reusable_tokens != self.credited_tokens + self.lost_tokens:
            raise LedgerError(f"request {self.request}: reusable is not credited + lost: {self}")
        ended = self.phase in (AttemptPhase.FINISHED, AttemptPhase.RETRACTED, AttemptPhase.ABORTED)
        if ended and self.prompt_tokens != self.credited_tokens + self.computed_tokens + self.abandoned_tokens:
            raise LedgerError(f"request {self.request}: the prompt is not credited + computed + abandoned: {self}")


#: Constants, as a look-up in an enumeration costs as much as the rest of a step.
_WAITING, _MATCHED, _ADMITTED = AttemptPhase.WAITING, AttemptPhase.MATCHED, AttemptPhase.ADMITTED
_FINISHED, _ABORTED = AttemptPhase.FINISHED, AttemptPhase.ABORTED


class OpenAccount(msgspec.Struct, gc=False):
    """An attempt that has not ended, of a request that has had `attempt` of them. Steps check before they change it.

    It is mutable, as a record for each step would take twice as long; callers see only its frozen copy.
    """

    request: RequestId
    group: AccountGroup
    attempt: int
    began_s: float
    phase: AttemptPhase = _WAITING
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    peer_tokens: int = 0
    computed_tokens: int = 0
    lost: dict[Loss, int] = {}
    prediction: Prediction | None = None

    @property
    def credited_tokens(self) -> int:
        """Tokens on the device without being computed, from any tier."""
        return self.device_tokens + self.host_tokens + self.storage_tokens + self.peer_tokens

    def frozen(self) -> Account:
        """Return a copy as an Account."""
        return self._account(self.phase, self.began_s, self.reusable_tokens, 0, dict(self.lost))

    def _account(self, phase: AttemptPhase, ended_s: float, reusable: int, rest: int, lost: dict[Loss, int]) -> Account:
        return Account(
            self.request,
            self.group,
            self.attempt,
            phase,
            self.began_s,
            ended_s,
            self.prompt_tokens,
            reusable,
            self.device_tokens,
            self.host_tokens,
            self.storage_tokens,
            self.peer_tokens,
            self.computed_tokens,
            rest,
            lost,
            self.prediction,
        )

    def matched(self, prompt_tokens: int, reusable_tokens: int) -> None:
        """Record a lookup: `reusable_tokens` over all tiers. It credits no token; a later lookup replaces it.

        Raises LedgerError after admission, or unless 0 <= reusable <= prompt.
        """
        if self.phase is not _WAITING and self.phase is not _MATCHED:
            raise _out_of_order(self, "matched")
        if not 0 <= reusable_tokens <= prompt_tokens:
            raise LedgerError(
                f"request {self.request}: {reusable_tokens} reusable tokens of a prompt of {prompt_tokens}"
            )
        self.phase, self.prompt_tokens, self.reusable_tokens = _MATCHED, prompt_tokens, reusable_tokens

    def predicted(self, prediction: Prediction) -> None:
        """Record the prediction of a first attempt, once, between match and admission. Raises LedgerError otherwise."""
        if self.phase is not _MATCHED or self.attempt or self.prediction is not None:
            raise LedgerError(f"request {self.request}: a first attempt is predicted once, after its first match")
        if not 0 <= prediction.tokens <= self.prompt_tokens:
            raise LedgerError(
                f"request {self.request}: {prediction.tokens} tokens predicted of a prompt of {self.prompt_tokens}"
            )
        self.prediction = prediction

    def admitted(self, credit: Credit, lost: Losses) -> None:
        """Begin the attempt with `credit` on the device; the rest of the match is `lost`.

        Raises LedgerError unless matched, and if credit and lost do not add up to reusable.
        """
        if self.phase is not _MATCHED:
            raise _out_of_order(self, "admitted")
        device, host = credit.device_tokens, credit.host_tokens
        storage, peer = credit.storage_tokens, credit.peer_tokens
        missing = self.reusable_tokens - device - host - storage - peer
        if missing != (sum(lost.values()) if lost else 0) or device < 0 or host < 0 or storage < 0 or peer < 0:
            raise LedgerError(
                f"request {self.request}: {self.reusable_tokens} reusable tokens are not device {device}"
                f" + host {host} + storage {storage} + peer {peer} + lost {_words(lost)}"
            )
        if lost:
            if min(lost.values()) < 0:
                raise LedgerError(f"request {self.request}: lost {_words(lost)}")
            self.lost = dict(lost)
        self.phase, self.attempt = _ADMITTED, self.attempt + 1
        self.device_tokens, self.host_tokens, self.storage_tokens, self.peer_tokens = device, host, storage, peer

    def computed(self, tokens: int) -> None:
        """Count a computed chunk of the prompt, which is no hit even if a lookup finds the chunk before it.

        Raises LedgerError unless admitted, or beyond the prompt.
        """
        if self.phase is not _ADMITTED:
            raise _out_of_order(self, "computed")
        done = self.computed_tokens + tokens
        if tokens < 0 or self.credited_tokens + done > self.prompt_tokens:
            raise LedgerError(
                f"request {self.request}: {tokens} more tokens after {self.credited_tokens} credited and"
                f" {self.computed_tokens} computed, of a prompt of {self.prompt_tokens}"
            )
        self.computed_tokens = done

    def withdrawn(self, credit: Credit, reason: Loss) -> None:
        """Turn credited tokens into lost ones: their copy failed, or its digest differs.

        Raises LedgerError unless admitted, or beyond the credit.
        """
        if self.phase is not _ADMITTED:
            raise _out_of_order(self, "withdrawn")
        left = (
            self.device_tokens - credit.device_tokens,
            self.host_tokens - credit.host_tokens,
            self.storage_tokens - credit.storage_tokens,
            self.peer_tokens - credit.peer_tokens,
        )
        if min(left) < 0 or credit.least_tokens < 0:
            raise LedgerError(
                f"request {self.request}: withdrawing {credit} leaves {left} for device, host, storage, peer"
            )
        self.device_tokens, self.host_tokens, self.storage_tokens, self.peer_tokens = left
        self.lost[reason] = self.lost.get(reason, 0) + credit.tokens

    def ended(self, phase: AttemptPhase, now_s: float, concurrent_tokens: int = 0) -> Account:
        """Return the account of the ended attempt. Only a finished one must have its whole prompt credited or computed.

        `concurrent_tokens` were computed here although another request has put them into the tree by now: reusable, and
        lost. Raises LedgerError if a law is broken, or if an attempt that was not aborted had not been admitted.
        """
        credited = self.credited_tokens
        rest = self.prompt_tokens - credited - self.computed_tokens
        if phase is not _ABORTED and self.phase is not _ADMITTED:
            raise _out_of_order(self, phase)
        if phase is _FINISHED and rest:
            raise LedgerError(
                f"request {self.request}: a prompt of {self.prompt_tokens} is not {credited} credited"
                f" + {self.computed_tokens} computed"
            )
        reusable, lost = self.reusable_tokens, self.lost
        if concurrent_tokens:
            reusable += concurrent_tokens
            if concurrent_tokens < 0 or reusable > self.prompt_tokens:
                raise LedgerError(
                    f"request {self.request}: {concurrent_tokens} concurrent tokens after {self.reusable_tokens}"
                    f" reusable ones, of a prompt of {self.prompt_tokens}"
                )
            lost = {**lost, Loss.CONCURRENT: lost.get(Loss.CONCURRENT, 0) + concurrent_tokens}
        return self._account(phase, now_s, reusable, rest, lost)


def _out_of_order(account: OpenAccount, event: str) -> LedgerError:
    return LedgerError(f"request {account.request} is {account.phase}: it cannot be {event}")


def _words(lost: Losses) -> str:
    return ", ".join(f"{reason} {tokens}" for reason, tokens in lost.items()) or "0"
