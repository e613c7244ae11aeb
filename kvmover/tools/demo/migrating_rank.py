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

#: Pause between polls of a migration without a token to compute, s.
PAUSE_S = 0.0002

#: Longest wait for ranks of another fleet to connect, s.
GREETING_S = 20.0

CONFIG = MigrationConfig()


@dataclass(frozen=True, slots=True)
class MigratingSeat(Seat):
    """A Seat for a rank whose answers move."""

    def sit(self) -> MigratingRank:
        """Make the rank, in this process."""
        return MigratingRank(self)


@dataclass(frozen=True, slots=True)
class AnswerShare:
    """A side's share of a moved answer: its tokens, and how clearly each won.

    `goes_on`: True if this side now has the request, with the answer so far. `tokens`: tokens of prompt and answer
    whose rows this side has; `landed_tokens`: those of them whose rows both sides have, as far as this one knows.
    `pause_s`: time in which the source had no token to compute.
    """

    goes_on: bool
    answer: list[int]
    gaps: list[float]
    tokens: int
    landed_tokens: int
    results: list[Result]
    pause_s: float = 0.0
    reason: str | None = None


class MigratingRank(DemoRank):
    """A seated process on either side of a migration. All ranks of a fleet are asked alike, and agree at each step."""

    def depart(
        self, migration: Migration, answer: list[int], count: int, pages: list[int], unfinished_tokens: int = -1
    ) -> AnswerShare:
        """Continue an answer, for at most `count` tokens, until it has moved; an answer that ends first stays here.

        It is left as it is, between two fleets, once the last round lacks `unfinished_tokens` tokens.
        """
        answer, first, cache = list(answer), len(self._model.gaps), self._cache(pages)
        prompt_tokens = migration.tokens - len(answer) + 1
        most, paused_at, paused_s = len(answer) + count, 0.0, 0.0

        def now() -> Checkpoint:
            return Checkpoint(prompt_tokens + len(answer) - 1, [pages], json.dumps(answer).encode())

        self._meet(migration.target)
        departing = DepartingRank(self._mover, migration, now(), CONFIG, self._agree)
        while not departing.settled and departing.may_write != unfinished_tokens:
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
        if departing.settled:
            self._mover.wait(departing.transfers)
        self._watched.look()
        tokens, results = prompt_tokens + len(answer) - 1, _results(departing.transfers)
        goes_on, gaps = departing.may_write > 0, self._model.gaps[first:]
        landed_tokens, reason = departing.landed_tokens, departing.reason
        return AnswerShare(goes_on, answer, gaps, tokens, landed_tokens, results, paused_s, reason)

    def arrive(self, migration: Migration, pages: list[int]) -> AnswerShare:
        """Receive an answer while it is computed, until it is here or has failed to come."""
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
        answer, landed, results = json.loads(arriving.payload), arriving.landed_tokens, _results(arriving.transfers)
        return AnswerShare(here, answer, [], landed, landed, results, reason=arriving.reason)

    def _meet(self, party: Party) -> None:
        """Poll until all ranks of a fleet are connected. Raises KvmoverError after 20 s."""
        until = time.monotonic() + GREETING_S
        while len(self._mover.ranks(party.engine)) < party.ranks:
            if time.monotonic() > until:
                raise KvmoverError(f"of {party} only {sorted(self._mover.ranks(party.engine))} are connected")
            if not self._mover.poll():
                time.sleep(PAUSE_S)

    def catch_up(self, tokens: tuple[int, ...], landed: int, pages: list[int]) -> int:
        """Compute the rows of `tokens` after the first `landed`, for a source that died. Returns the next token."""
        return self._model.prefill(tokens, self._cache(pages), landed)

    def digests(self, pages: list[int], tokens: int) -> Digests:
        """Returns the digests of the rows of a request's first tokens."""
        return self._digests(pages, range(tokens))


def _results(transfers: Sequence[Transfer]) -> list[Result]:
    return [each.result for each in transfers if each.result is not None and each.result.landed]
