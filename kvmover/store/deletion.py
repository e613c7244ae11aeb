"""One door for every deletion of what may be another's: it asks for grounds, keeps a budget, and gives a permit.

Grounds are two looks at the truth of different kinds that agree, or an order: a policy's, or a person's. An index is no
look, since it may lag. Whatever unlinks a file of a segment, kills a header, gives blocks back, or removes an object of
a service takes a `Permit`, which is made here alone.

A DeletionBudget bounds what one process deletes as bad: with bad memory, or a stale cache, it finds every page bad.
Beyond its budget it forgets them alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from kvmover.errors import StoreError

#: Bad objects that a process may delete at once, and again in so many seconds.
DELETIONS, _REFILL_S = 32, 3600


@dataclass(slots=True)
class DeletionBudget:
    """What is left at second `asked_s`; it fills up again with time.

    >>> budget = DeletionBudget(100)
    >>> sum(budget.spend(1, 100) for _ in range(99)), budget.spend(1, 200), budget.spend(1, 300)
    (32, False, True)

    What may cost others more than all of it takes all of it.

    >>> budget = DeletionBudget(100)
    >>> budget.spend(1000, 100), budget.spend(1, 100), budget.spend(0, 100)
    (True, False, True)
    """

    asked_s: float
    _left: float = DELETIONS

    def spend(self, count: int, now_s: float) -> bool:
        """Returns whether `count` more may be deleted: all of them, or none."""
        self._left = min(DELETIONS, self._left + max(0, now_s - self.asked_s) * DELETIONS / _REFILL_S)
        self.asked_s = now_s
        cost = min(count, DELETIONS)
        if self._left < cost:
            return False
        self._left -= cost
        return True


#: Why a segment goes in which nothing lives.
EMPTY = "empty segment"


class Seen(StrEnum):
    """Ways of looking, which fail apart from each other.

    READ: the bytes, as they came to who wanted them. ANEW: the bytes, by files or requests of their own. LISTING: names
    and sizes of a folder. NAME: one name, asked for by itself. TIMES: when files were written last. LOCK: whether a
    writer lives.
    """

    READ = "read"
    ANEW = "anew"
    LISTING = "listing"
    NAME = "name"
    TIMES = "times"
    LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Look:
    """One look, and its words: `Look(Seen.ANEW, "digest")`."""

    seen: Seen
    says: str


class DeletionOrder(StrEnum):
    """Deletions that nobody has to find anything bad for: a policy or a person says so, or the writer itself.

    LOST: the disk did not take what this process wrote. REPLACED: another object says the same.
    """

    EVICTED = "evicted"
    EXPIRED = "expired"
    CLEARED = "cleared"
    LOST = "lost"
    REPLACED = "replaced"

    @property
    def reason(self) -> str:
        """The word under which deletions are counted."""
        return self.value

    @property
    def promised(self) -> int:
        """Nobody counts on what an order deletes."""
        return 0


@dataclass(frozen=True, slots=True)
class TwoLooks:
    """Two looks of different kinds, which agree. Raises StoreError for two of one kind.

    `promised`: how many objects others may count on, if both looks are wrong; the budget is for them.
    """

    first: Look
    second: Look
    promised: int

    def __post_init__(self) -> None:
        if self.first.seen is self.second.seen:
            raise StoreError(f"{self.first} and {self.second} are one look: nothing is deleted for that")

    @property
    def reason(self) -> str:
        """The word under which deletions are counted: the second look's."""
        return self.second.says


Grounds = DeletionOrder | TwoLooks


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to delete what was asked for, on these grounds. Only a DeletionDoor makes one."""

    grounds: Grounds


class DeletionDoor:
    """Gives leave to delete, and counts by reason what it gave leave for. Safe for any thread."""

    def __init__(self, now_s: float) -> None:
        #: Objects, and segments and left-overs of some, by the reason for which they were deleted.
        self.deleted: Counter[str] = Counter()
        self._budget, self._lock = DeletionBudget(now_s), Lock()

    def ask(self, grounds: Grounds, count: int, now_s: float) -> Permit | None:
        """Leave to delete `count` things at second `now_s`.

        None where what others may count on is more than the budget has left.
        """
        with self._lock:
            if not self._budget.spend(grounds.promised, now_s):
                return None
            if count:
                self.deleted[grounds.reason] += count
        return Permit(grounds)

    def order(self, order: DeletionOrder, count: int = 0) -> Permit:
        """Leave to do what a policy or a person has ordered, which costs no budget."""
        with self._lock:
            if count:
                self.deleted[order.reason] += count
        return Permit(order)
