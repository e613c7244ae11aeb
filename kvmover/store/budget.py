"""A DeletionBudget bounds what one process deletes as bad: it may be what is bad itself, and others keep their pages.

A process with bad memory, or a stale cache, finds every page bad. Beyond its budget it forgets them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bad objects that a process may delete at once, and again in so many seconds.
_DELETIONS, _REFILL_S = 32, 3600


@dataclass(slots=True)
class DeletionBudget:
    """What is left at second `asked_s`; it fills up again with time.

    >>> budget = DeletionBudget(100)
    >>> sum(budget.spend(100) for _ in range(99)), budget.spend(200), budget.spend(300)
    (32, False, True)
    """

    asked_s: float
    _left: float = _DELETIONS

    def spend(self, now_s: float) -> bool:
        """Whether one more may be deleted."""
        self._left = min(_DELETIONS, self._left + max(0, now_s - self.asked_s) * _DELETIONS / _REFILL_S)
        self.asked_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
