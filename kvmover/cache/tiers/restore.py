"""Restore: one request's way back to the device, and its account. Values and sums; `restoring` carries it out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvmover.cache.ledger import Credit, Loss
from kvmover.cache.prefix import Key, Match, Receipt
from kvmover.cache.prefix.actions import PageArray
from kvmover.cache.prefix.keys import NO_IDS
from kvmover.cache.tiers.copies import Gate
from kvmover.cache.tiers.tickets import Ticket


class Phase(StrEnum):
    """LOOK: asking storage. READ: from storage to the host. LOAD: to the device, or waiting for another's load."""

    LOOK = "look"
    READ = "read"
    LOAD = "load"
    READY = "ready"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Restore:
    """What a request gets. `tokens`, `page_ids`, `held` and `receipt` count when `phase` is READY.

    `receipt` keeps the pages on the device: give it back by `Controller.release`. While in LOAD, `gate` lets a forward
    pass start on `loading`, the match of `best_tokens` that the load makes true, once its first layers are there.

    Two sums for the ledger: `ledger.matched(r, prompt, restore.reusable_tokens)`, and
    `ledger.admitted(r, restore.credit, restore.lost)`.
    """

    key: Key
    limit_tokens: int
    began_s: float
    found: Match
    phase: Phase = Phase.LOOK
    tokens: int = 0
    page_ids: PageArray = field(default_factory=lambda: NO_IDS)
    held: tuple[tuple[str, PageArray], ...] = ()
    receipt: Receipt | None = None
    credit: Credit = field(default_factory=Credit)
    lost: dict[Loss, int] = field(default_factory=dict[Loss, int])
    reusable_tokens: int = 0
    gate: Gate | None = None
    #: Locks of what was found, until what is brought is locked too.
    keeps: list[Receipt] = field(default_factory=list[Receipt])
    ticket: Ticket | None = None
    reasons: Counter[Loss] = field(default_factory=Counter[Loss])
    patience_s: float | None = None
    wanted: bool = False
    loads: int = 0

    @property
    def done(self) -> bool:
        return self.phase in (Phase.READY, Phase.ABORTED)

    def ready(self, match: Match, receipt: Receipt) -> None:
        """The end: credit what is on the device by where it was when the request came, and say why the rest is lost."""
        device, best = self.found.tokens, self.found.best_tokens
        # More than was found anywhere is what other requests have computed meanwhile.
        more = max(0, match.tokens - max(self.reusable_tokens, best))
        self.reusable_tokens = max(self.reusable_tokens, best) + more
        here = match.tokens - more
        on_device = min(here, device)
        on_host = min(here, best) - on_device
        self.credit = Credit(on_device + more, on_host, here - on_device - on_host)
        self.lost = balanced(self.reasons, self.reusable_tokens - match.tokens)
        self.tokens, self.page_ids, self.held = match.tokens, match.page_ids, match.held
        self.receipt, self.phase = receipt, Phase.READY


def balanced(reasons: Counter[Loss], due: int) -> dict[Loss, int]:
    """Reasons that add up to `due` tokens: the first to apply first, and what none explains was taken meanwhile.

    >>> balanced(Counter({Loss.LATE: 32, Loss.THRESHOLD: 16}), 40)
    {<Loss.THRESHOLD: 'threshold'>: 16, <Loss.LATE: 'late'>: 24}
    """
    lost: dict[Loss, int] = {}
    for reason in Loss:
        tokens = min(reasons[reason], due)
        if tokens > 0:
            lost[reason] = tokens
            due -= tokens
    if due:
        lost[Loss.CAPACITY_EVICTED] = lost.get(Loss.CAPACITY_EVICTED, 0) + due
    return lost


def longest(legal: np.ndarray, over: int = 0) -> int:
    """The largest legal number of pages above `over`, or 0."""
    found = np.flatnonzero(legal[over + 1 :])
    return int(found[-1]) + over + 1 if len(found) else 0
