"""Its import makes each mover of the process one of the make-believe release before this one."""

from __future__ import annotations

from typing import Any

from kvmover.transfer.mover import Mover
from tests.transfer.releases import becomes_the_release_before

_made = Mover.__init__


def _make(self: Mover, *arguments: Any, **named: Any) -> None:
    _made(self, *arguments, **named)
    becomes_the_release_before(self)


Mover.__init__ = _make  # type: ignore[method-assign]
