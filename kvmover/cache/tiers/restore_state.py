"""A Restoring is the state of one restore on one rank, which `restore_machine` steps."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from kvmover.cache.ledger import Credit, Loss
from kvmover.cache.prefix import InvariantBroken
from kvmover.cache.tiers.agreement import PartialWork
from kvmover.cache.tiers.policy import TierPolicy


class RestorePhase(StrEnum):
    """The phase of a restore.

    LOOK: asking peers and storage. READ: from one of them to the host. LOAD: to the device, or waiting for another
    restore's load.
    """

    LOOK = "look"
    READ = "read"
    LOAD = "load"
    READY = "ready"
    ABORTED = "aborted"


_ENDS = (RestorePhase.READY, RestorePhase.ABORTED)
_NO_REASONS: Mapping[Loss, int] = MappingProxyType({})


class RestoreTerms(msgspec.Struct, frozen=True):
    """The terms that all restores of a rank share. `token_bytes`: bytes of KV a token on this rank.

    `partial`: the fate of pages that some ranks alone have brought. `stored`: True if there is storage. `peers`:
    engines to ask.
    """

    page_tokens: int
    token_bytes: int
    policy: TierPolicy
    partial: PartialWork
    stored: bool
    peers: int = 0


#: The `source` that stands for storage; peers count from 0.
STORAGE = -1


class ReadSource(msgspec.Struct, frozen=True, order=True):
    """A read that all ranks could do: the first `pages` pages of the prompt, from a peer or STORAGE."""

    pages: int
    source: int


class Restoring(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one restore. Numbers of tokens count from the beginning of the prompt.

    At the request's coming `device_tokens` were on the device, `best_tokens` on device or host, `reusable_tokens` on
    any tier. `asked`: the phase of the open operation of all ranks, which outlasts an abort. `op`: this rank's part in
    the tree, of `op_pages` pages, or 0; `done_pages`: its answer, None before. `tokens`, `credit` and `lost` count when
    `phase` is READY.
    """

    terms: RestoreTerms
    limit_tokens: int
    began_s: float
    device_tokens: int
    best_tokens: int
    reusable_tokens: int
    phase: RestorePhase = RestorePhase.LOOK
    asked: RestorePhase | None = None
    op: int = 0
    op_pages: int = 0
    done_pages: int | None = None
    patience_s: float | None = None
    wanted: bool = False
    stopped: bool = False
    loads: int = 0
    left: tuple[ReadSource, ...] = ()
    reading: ReadSource | None = None
    peer_tokens: int = 0
    reasons: Mapping[Loss, int] = _NO_REASONS
    tokens: int = 0
    credit: Credit = Credit()
    lost: Mapping[Loss, int] = _NO_REASONS

    @property
    def done(self) -> bool:
        """True if the restore is ready or was given up."""
        return self.phase in _ENDS

    @property
    def over(self) -> bool:
        """True if it is done and no operation is open: events do not change it any more."""
        return self.done and self.asked is None

    def check(self) -> None:
        """Raise InvariantBroken for an impossible state. O(reasons)."""
        page, phase = self.terms.page_tokens, self.phase
        rules = {
            "device, best and reusable prefix are each as long as the one before": (
                0 <= self.device_tokens <= self.best_tokens <= self.reusable_tokens <= self.limit_tokens
            ),
            "prefixes end with a page": not any(
                tokens % page for tokens in (self.device_tokens, self.best_tokens, self.reusable_tokens, self.tokens)
            ),
            "no reason explains less than nothing": min(self.reasons.values(), default=0) >= 0,
            "only a load may have to wait before it is begun": (
                phase in (*_ENDS, RestorePhase.LOAD) or self.asked is phase
            ),
            "a restore that is ready is at no operation": phase is not RestorePhase.READY or self.asked is None,
            "an operation is of the phase, unless the restore was given up": (
                self.asked is None or phase is RestorePhase.ABORTED or self.asked is phase
            ),
            "an operation of the tree is a read's or a load's": (
                not self.op or self.asked in (RestorePhase.READ, RestorePhase.LOAD)
            ),
            "pages are on their way by an operation alone": (self.op != 0) >= (self.op_pages != 0),
            "no more is answered than was begun": self.done_pages is None or 0 <= self.done_pages <= self.op_pages,
            "a read is of a source": self.asked is not RestorePhase.READ or self.reading is not None,
            "nothing is answered that nobody asked": self.done_pages is None or self.asked is not None,
            "one load is begun at most": self.loads <= 1,
            "every reusable token is credited or lost, once": (
                phase is not RestorePhase.READY
                or self.reusable_tokens - sum(self.lost.values()) == self.tokens == self.credit.tokens
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise InvariantBroken(f"{rule}: {self}")
