"""A DeletionDoor permits every deletion of shared data: it asks for grounds, keeps a budget, and issues a permit.

Grounds are two agreeing looks of different kinds at the stored data, or an order by a policy or a person. An index is
no look, since it may lag. Code that unlinks a segment's file, kills a header, frees blocks, or removes a service's
object takes a `Permit`, which only this module makes.

A DeletionBudget bounds the objects one process deletes as bad: with bad memory or a stale cache it finds every page
bad. Beyond the budget it only drops them from its own index.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from kvmover.errors import StoreError

#: Bad objects that a process may delete at once, and the seconds in which that budget refills.
DELETIONS, _REFILL_S = 32, 3600


@dataclass(slots=True)
class DeletionBudget:
    """The deletions left at second `asked_s`, refilled over time.

    >>> budget = DeletionBudget(100)
    >>> sum(budget.spend(1, 100) for _ in range(99)), budget.spend(1, 200), budget.spend(1, 300)
    (32, False, True)

    A deletion that costs more than the full budget takes all of it.

    >>> budget = DeletionBudget(100)
    >>> budget.spend(1000, 100), budget.spend(1, 100), budget.spend(0, 100)
    (True, False, True)
    """

    asked_s: float
    _left: float = DELETIONS

    def spend(self, count: int, now_s: float) -> bool:
        """Returns True and charges the budget if `count` more objects may be deleted; all or not at all."""
        self._left = min(DELETIONS, self._left + max(0, now_s - self.asked_s) * DELETIONS / _REFILL_S)
        self.asked_s = now_s
        cost = min(count, DELETIONS)
        if self._left < cost:
            return False
        self._left -= cost
        return True


#: The reason to remove a segment without live objects.
EMPTY = "empty segment"


class Seen(StrEnum):
    """The kinds of look, which fail independently.

    READ: the bytes, as the reader received them. ANEW: the bytes, through newly opened files or new requests. LISTING:
    names and sizes of a folder. NAME: a lookup of one name. TIMES: last write times of files. LOCK: a writer's
    liveness.
    """

    READ = "read"
    ANEW = "anew"
    LISTING = "listing"
    NAME = "name"
    TIMES = "times"
    LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Look:
    """A look and its finding: `Look(Seen.ANEW, "digest")`."""

    seen: Seen
    says: str


class DeletionOrder(StrEnum):
    """The deletions that need no finding: ordered by a policy, a person, or the object's writer.

    LOST: the disk refused this process's write. REPLACED: another object holds the same content.
    """

    EVICTED = "evicted"
    EXPIRED = "expired"
    CLEARED = "cleared"
    LOST = "lost"
    REPLACED = "replaced"

    @property
    def reason(self) -> str:
        """Returns the key under which deletions are counted."""
        return self.value

    @property
    def promised(self) -> int:
        """Returns 0: an order costs no budget."""
        return 0


@dataclass(frozen=True, slots=True)
class TwoLooks:
    """A pair of agreeing looks. Raises StoreError if both are of one kind.

    `promised`: objects that would be lost if both looks are wrong, which is the cost to the budget.
    """

    first: Look
    second: Look
    promised: int

    def __post_init__(self) -> None:
        if self.first.seen is self.second.seen:
            raise StoreError(f"{self.first} and {self.second} are one look: nothing is deleted for that")

    @property
    def reason(self) -> str:
        """Returns the key under which deletions are counted: the second look's finding."""
        return self.second.says


Grounds = DeletionOrder | TwoLooks


@dataclass(frozen=True, slots=True)
class Permit:
    """A permit to delete on these grounds. Only a DeletionDoor makes one."""

    grounds: Grounds


class DeletionDoor:
    """A door that issues permits to delete, and counts permitted deletions by reason. Safe for any thread."""

    def __init__(self, now_s: float) -> None:
        #: Deleted objects, segments and left-over files, counted by reason.
        self.deleted: Counter[str] = Counter()
        self._budget, self._lock = DeletionBudget(now_s), Lock()

    def ask(self, grounds: Grounds, count: int, now_s: float) -> Permit | None:
        """Returns a permit to delete `count` objects at second `now_s`.

        None if the grounds' `promised` exceeds the rest of the budget.
        """
        with self._lock:
            if not self._budget.spend(grounds.promised, now_s):
                return None
            if count:
                self.deleted[grounds.reason] += count
        return Permit(grounds)

    def order(self, order: DeletionOrder, count: int = 0) -> Permit:
        """Returns a permit for a deletion ordered by a policy, a person or the writer; costs no budget."""
        with self._lock:
            if count:
                self.deleted[order.reason] += count
        return Permit(order)
