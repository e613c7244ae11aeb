"""A DeletionBudget bounds what one process deletes as bad: it may be what is bad itself, and others keep their pages.

A process with bad memory, or a stale cache, finds every page bad. Beyond its budget it forgets them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

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
