"""Rounds: which tokens of a running request are copied next, while it writes more, and when the last ones are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvmover.errors import PlanError
from kvmover.fields import check_positive, settle_whole
from kvmover.transfer.protocol.wire import Natural


class Round(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a request, copied at one time. The `last` round ends where the request stops to write:
    it is announced before its last tokens are computed.
    """

    number: Natural
    start: Natural
    stop: Natural
    last: bool = False

    def check(self) -> None:
        """Raise AssertionError for a round that copies nothing: not even states, which travel with any token."""
        assert 0 <= self.start < self.stop, f"{self} copies nothing"


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """How a running request is copied. Raises PlanError for what cannot be.

    The last round is announced when at most `tail_tokens` are left to copy, or after `most_rounds` less one. It ends
    `ahead_tokens` behind what is written then, so that the other side has asked for it when the request gets there.
    `patience_s`: how long one side waits for a word of the other that is not known to be dead.
    """

    tail_tokens: int = 8
    ahead_tokens: int = 4
    most_rounds: int = 8
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        settle_whole(self, "a migration", PlanError, tail_tokens=0, ahead_tokens=1, most_rounds=2)
        check_positive(self, "a migration", PlanError, "patience_s")


def next_round(config: MigrationConfig, done: Round, tokens: int) -> Round:
    """What is copied when `done` has landed and `tokens` are written.

    >>> next_round(MigrationConfig(), Round(0, 0, 100), 140)
    Round(number=1, start=100, stop=140, last=False)
    >>> next_round(MigrationConfig(), Round(1, 100, 140), 142)
    Round(number=2, start=140, stop=146, last=True)
    """
    number = done.number + 1
    last = tokens - done.stop <= config.tail_tokens or number + 1 >= config.most_rounds
    return Round(number, done.stop, tokens + config.ahead_tokens if last else tokens, last)
