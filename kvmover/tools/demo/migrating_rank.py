"""MigratingRank: a rank of the demo whose answers move to another fleet, or come from one, while they are computed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvmover.errors import KvmoverError
from kvmover.migrate import ArrivalPhase, ArrivingRank, Checkpoint, DepartingRank, Migration, MigrationConfig, Party
from kvmover.tools.demo.rank import DemoRank, Digests, Seat
from kvmover.transfer.result import Result, Transfer

#: Between two looks at a migration while there is no token to compute.
PAUSE_S = 0.0002

#: Ranks of another fleet are connected by then, or never.
GREETING_S = 20.0

CONFIG = MigrationConfig()


@dataclass(frozen=True, slots=True)
class MigratingSeat(Seat):
    """As a Seat, for a rank whose answers move."""

    def sit(self) -> MigratingRank:
        """Become that rank."""
        return MigratingRank(self)


@dataclass(frozen=True, slots=True)
class AnswerShare:
    """What one side computed of an answer that moved, and how clearly each token won. `goes_on`: whether it has the
    request now, with the answer so far. `pause_s`: how long the source had no token to compute.
    """

    goes_on: bool
    answer: list[int]
    gaps: list[float]
    tokens: int
    results: list[Result]
    pause_s: float = 0.0
    reason: str | None = None


class MigratingRank(DemoRank):
    """A seated process on either side of a migration. All ranks of a fleet are asked alike, and agree at each step."""

    def depart(self, migration: Migration, answer: list[int], count: int, pages: list[int]) -> AnswerShare:
        """Go on with an answer, for `count` more tokens at most, until it has moved; one that ends first stays."""
        answer, first, cache = list(answer), len(self._model.gaps), self._cache(pages)
        prompt_tokens = migration.tokens - len(answer) + 1
        most, paused_at, paused_s = len(answer) + count, 0.0, 0.0

        def now() -> Checkpoint:
            return Checkpoint(prompt_tokens + len(answer) - 1, [pages], json.dumps(answer).encode())

        self._meet(migration.target)
        departing = DepartingRank(self._mover, migration, now(), CONFIG, self._agree)
        while not departing.settled:
            if departing.may_write and len(answer) < most:
                answer.append(self._model.decode(answer[-1], prompt_tokens + len(answer) - 1, cache))
                departing.wrote(now())
            elif departing.may_write and not departing.reason:
                departing.keep("the answer is complete")
            worked = self._mover.poll()
            departing.poll()
            if not departing.may_write:
                paused_at = paused_at or time.monotonic()
                paused_s = time.monotonic() - paused_at
                if not worked:
                    time.sleep(PAUSE_S)
        self._mover.wait(departing.transfers)
        self._watched.look()
        tokens, results = prompt_tokens + len(answer) - 1, _results(departing.transfers)
        goes_on = departing.may_write > 0
        return AnswerShare(goes_on, answer, self._model.gaps[first:], tokens, results, paused_s, departing.reason)

    def arrive(self, migration: Migration, pages: list[int]) -> AnswerShare:
        """Land an answer that is being computed, until it is here or is not to come."""
        arriving = ArrivingRank(self._mover, migration, [pages], CONFIG, self._agree)
        arriving.allocated(len(pages) * self._pool.spec.page_tokens, [pages])
        while not arriving.settled:
            worked = self._mover.poll()
            arriving.poll()
            if not worked:
                time.sleep(PAUSE_S)
        self._mover.wait(arriving.transfers)
        self._watched.look()
        here = arriving.phase is ArrivalPhase.HERE
        answer = json.loads(arriving.payload)
        return AnswerShare(
            here, answer, [], arriving.landed_tokens, _results(arriving.transfers), reason=arriving.reason
        )

    def _meet(self, party: Party) -> None:
        """Wait until all ranks of a fleet have introduced themselves, who poll meanwhile."""
        until = time.monotonic() + GREETING_S
        while len(self._mover.ranks(party.engine)) < party.ranks:
            if time.monotonic() > until:
                raise KvmoverError(f"of {party} only {sorted(self._mover.ranks(party.engine))} are connected")
            if not self._mover.poll():
                time.sleep(PAUSE_S)

    def catch_up(self, tokens: tuple[int, ...], landed: int, pages: list[int]) -> int:
        """Compute the rows of `tokens` that had not landed when the fleet that had them died: the token behind them."""
        return self._model.prefill(tokens, self._cache(pages), landed)

    def digests(self, pages: list[int], tokens: int) -> Digests:
        """Of the rows of a request's first tokens."""
        return self._digests(pages, range(tokens))


def _results(transfers: Sequence[Transfer]) -> list[Result]:
    return [each.result for each in transfers if each.result is not None and each.result.landed]
