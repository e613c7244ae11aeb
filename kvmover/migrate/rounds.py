"""Rounds divide a running request's tokens while it writes more: which are copied next, and which
are the last. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvmover.errors import PlanError
from kvmover.fields import check_positive, settle_whole
from kvmover.transfer.protocol.wire import Natural


class Round(msgspec.Struct, frozen=True):
    """The tokens [start, stop) of a request, copied at one time; the `last` ends where the request stops writing."""

    number: Natural
    start: Natural
    stop: Natural
    last: bool = False

    def check(self) -> None:
        """Raise AssertionError for an empty round."""
        assert 0 <= self.start < self.stop, f"{self} copies nothing"


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """The settings of a migration. Raises PlanError for values out of range.

    The last round is announced when at most `tail_tokens` are left, or after `most_rounds` less one, and ends
    `ahead_tokens` after the tokens written by then. `patience_s`: seconds to wait for the other side, unless known to
    be dead.
    """

    tail_tokens: int = 8
    ahead_tokens: int = 4
    most_rounds: int = 8
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        settle_whole(self, "a migration", PlanError, tail_tokens=0, ahead_tokens=1, most_rounds=2)
        check_positive(self, "a migration", PlanError, "patience_s")


def next_round(config: MigrationConfig, done: Round, tokens: int) -> Round:
    """Returns the round after `done` has landed, when `tokens` are written.

    >>> next_round(MigrationConfig(), Round(0, 0, 100), 140)
    Round(number=1, start=100, stop=140, last=False)
    >>> next_round(MigrationConfig(), Round(1, 100, 140), 142)
    Round(number=2, start=140, stop=146, last=True)
    """
    number = done.number + 1
    last = tokens - done.stop <= config.tail_tokens or number + 1 >= config.most_rounds
    return Round(number, done.stop, tokens + config.ahead_tokens if last else tokens, last)
