"""Silence remembers that a pool's master kept a worker waiting for nothing: for a while nobody waits for it then."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable

#: An answer that failed within this cost nothing: the next call asks again.
_SLOW_S = 1.0
#: A master that was silent is asked again after this.
_REST_S = 10.0


class Silence:
    """A dead master takes seconds to fail each call: stores in a row would hold the pages of requests as long."""

    def __init__(self, said: str, clock: Callable[[], float]) -> None:
        """`said`: the words for a call that is refused. `clock`: in seconds."""
        self._said, self._clock, self._over_s = said, clock, -math.inf

    def now(self) -> float:
        """Return the time, for `heard`."""
        return self._clock()

    def check(self) -> None:
        """Raise OSError while the master is left alone."""
        if self._clock() < self._over_s:
            raise OSError(errno.ETIMEDOUT, self._said)

    def heard_nothing(self, began_s: float) -> None:
        """Leave the master alone for a while, if a call that began then was long without an answer."""
        if self._clock() - began_s >= _SLOW_S:
            self._over_s = self._clock() + _REST_S
