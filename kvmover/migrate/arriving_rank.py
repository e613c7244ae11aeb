"""An ArrivingRank and its Mover land a running request at one rank of the target, and take it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvmover.cache.tiers import Consensus, LocalConsensus
from kvmover.errors import PeerUnknown, PlanError, ProtocolError
from kvmover.migrate import arrival
from kvmover.migrate.arrival import (
    Acknowledged,
    Announced,
    ArrivalAction,
    ArrivalEvent,
    ArrivalPhase,
    AskRound,
    ListenFor,
    PatienceOver,
    SayDecision,
)
from kvmover.migrate.departure import Withdraw
from kvmover.migrate.migration import Announcement, Decision, Migration
from kvmover.migrate.migration_events import PartnerEnded, RoundFailed, RoundLanded
from kvmover.migrate.partners import AGAIN_S, Partners, has_failed, said_in
from kvmover.migrate.rounds import MigrationConfig, Round
from kvmover.transfer.events import Cancel
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.result import Cause, Transfer

#: Longest reason sent to the source, in characters.
MAX_REASON_CHARACTERS = 1000


class ArrivingRank:
    """A migration at one rank of the target. All ranks make the same calls in the same order, and agree by `agree`.

    `pages`: one table a component for the first `migration.tokens` tokens. Each step poll the mover, then this, until
    it is `settled`. Whenever `pages_for` is above 0, call `allocated` with pages for so many tokens or more. If `phase`
    is HERE the request is this engine's: rows of its first `landed_tokens` tokens are in the pages, and `payload` is
    the source's, as of `payload_tokens` tokens. The two numbers differ only if the source died: compute the tokens in
    between here. If it is DECLINED, for `reason`, the source has the request, and the pages are free unless
    `holds_pages`. Raises PeerUnknown if a rank of the source is not connected.
    """

    def __init__(
        self,
        mover: Mover,
        migration: Migration,
        pages: Sequence[npt.ArrayLike],
        config: MigrationConfig | None = None,
        agree: Consensus | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.migration = migration
        self._mover, self._config, self._clock = mover, config or MigrationConfig(), clock
        self._agree = agree or LocalConsensus()
        self._partners = Partners.of(mover, migration.source)
        self._pages, self._room_tokens = pages, migration.tokens
        self._pending: Round | None = None
        self._rounds: list[Transfer] = []
        self._current: Transfer | None = None
        self._announcement: Transfer | None = None
        self._answer: Transfer | None = None
        self._decision: Decision | None = None
        self._decided_at, self._say_at = np.inf, -np.inf
        self._reachable, self._unasked = False, False
        self._fault: str | None = None
        self.payload, self.payload_tokens = migration.payload, migration.tokens
        self.settled = False
        self._state, actions = arrival.begin(migration.first_round)
        self._act(actions)

    @property
    def phase(self) -> ArrivalPhase:
        """Returns the progress, at the end the side with the request."""
        return self._state.phase

    @property
    def reason(self) -> str | None:
        """Returns the reason for declining."""
        return self._state.reason

    @property
    def landed_tokens(self) -> int:
        """Returns the leading tokens in the pages; before the last round 0 for a model with recurrent states."""
        state = self._state
        whole = state.round.last and state.landed_tokens == state.round.stop
        return state.landed_tokens if whole or not self._partners.has_states else 0

    @property
    def pages_for(self) -> int:
        """Returns the leading tokens that need pages, or 0."""
        return self._pending.stop if self._pending is not None else 0

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Returns the rounds' transfers so far, in order."""
        return tuple(self._rounds)

    @property
    def holds_pages(self) -> bool:
        """Returns True if a transfer may still write the pages."""
        return any(not transfer.ended or transfer.quarantined for transfer in self._rounds)

    def allocated(self, tokens: int, pages: Sequence[npt.ArrayLike]) -> None:
        """Name pages for the first `tokens` tokens. Raises PlanError as Mover.receive does."""
        before = self._pages, self._room_tokens
        self._pages, self._room_tokens = pages, tokens
        try:
            self._ask()
        except PlanError:
            self._pages, self._room_tokens = before
            raise

    def decline(self, reason: str) -> None:
        """Decline the request, unless it is all here; a dead source's is taken after all."""
        self._step(Cancel(reason))

    def poll(self) -> ArrivalPhase:
        """Advance by the transfers' results, in one round of `agree`. Returns the phase."""
        if self.settled:
            return self.phase
        agreed = self._agree.minimum(self._votes())
        if agreed is None:
            return self.phase
        number, other = self._state.round.number, -int(agreed[1])
        landed, sound, announced, lives, quiet, heard, patient, asked = map(bool, agreed[2:].tolist())
        if int(agreed[0]) == other == number:  # skipped where ranks agree late, after the round is over
            self._look_at_round(landed, sound, announced)
        if not lives and not self._state.ended:
            self._abort(f"{self.migration.source.engine} is dead")
            if quiet:
                self._step(PartnerEnded(f"{self.migration.source.engine} is dead"))
        if heard:
            self._step(Acknowledged())
        elif not patient:
            self._step(PatienceOver())
        self.settled = self._state.ended and (heard or not lives or not asked)
        self._speak()
        return self.phase

    def _votes(self) -> npt.NDArray[np.int64]:
        current, announcement, answer = (
            None if each is None else each.result for each in (self._current, self._announcement, self._answer)
        )
        landed, announced, heard = (each is not None and each.landed for each in (current, announcement, answer))
        failed = any(each is not None and not each.landed for each in (current, announcement))
        sound = self._fault is None and not failed
        lives = self._partners.live(self._clock())
        listens = self._announcement is not None and not self._announcement.ended
        quiet = not listens and not self.holds_pages
        patient = self._clock() < self._decided_at + self._config.patience_s
        number = self._state.round.number
        row = [number, -number, landed, sound, announced, lives, quiet, heard, patient, not self._unasked]
        return np.array(row, np.int64)

    def _look_at_round(self, landed: bool, sound: bool, announced: bool) -> None:
        if landed:
            self._landed()
        if not sound:
            self._step(RoundFailed(self._why()))
        if announced and self.phase is ArrivalPhase.COPYING:
            self._announced()

    def _why(self) -> str:
        for each in (self._current, self._announcement):
            if each is not None and each.result is not None and each.result.reason is not None:
                return each.result.reason
        return self._fault or "a round failed on another rank"

    def _landed(self) -> None:
        landed = self._state.round
        if landed.last and self.phase is ArrivalPhase.COPYING:
            assert self._current is not None
            self.payload, self.payload_tokens = said_in(self._current), landed.stop
        self._step(RoundLanded(landed.number))

    def _announced(self) -> None:
        assert self._announcement is not None
        try:
            said = Announcement.decode(said_in(self._announcement))
        except ProtocolError as error:
            self._step(RoundFailed(str(error)))
            return
        self._announcement = None
        self._step(Announced(said.round))
        if self.phase is ArrivalPhase.COPYING:
            self.payload, self.payload_tokens = said.payload, said.tokens

    def _step(self, event: ArrivalEvent) -> None:
        self._state, actions = arrival.step(self._state, event)
        self._state.check()
        self._act(actions)

    def _act(self, actions: Sequence[ArrivalAction]) -> None:
        for action in actions:
            match action:
                case AskRound(round_):
                    self._pending, self._current = round_, None
                    self._ask()
                case ListenFor(number):
                    name, content = self.migration.announcement_name(number), self.migration.content
                    self._announcement = self._receive(name, range(0), None, content)
                case SayDecision(decision):
                    self._decision, self._decided_at = decision, self._clock()
                case Withdraw(reason):
                    self._pending = None
                    self._abort(reason)

    def _ask(self) -> None:
        """Ask for the pending round, once its pages are named."""
        wanted = self._pending
        if wanted is None or wanted.stop > self._room_tokens:
            return
        name = self.migration.round_name(wanted.number)
        content = self.migration.content_of(wanted.stop)
        self._current = self._receive(name, range(wanted.start, wanted.stop), self._pages, content)
        self._pending = None
        self._rounds += [self._current] if self._current is not None else []

    def _receive(
        self, name: str, positions: range, pages: Sequence[npt.ArrayLike] | None, content: Content | None
    ) -> Transfer | None:
        source, patience_s = self.migration.source, self._config.patience_s
        try:
            return self._mover.receive(
                name, source.engine, positions, pages, source.everyone, patience_s, content=content
            )
        except PeerUnknown as error:
            self._fault = str(error)
            return None

    def _abort(self, reason: str) -> None:
        for transfer in (*self._rounds, *([self._announcement] if self._announcement else [])):
            if not transfer.ended:
                self._mover.abort(transfer, reason)

    def _speak(self) -> None:
        """Send the decision until heard. A reachable source that does not ask has it."""
        if self._answer is not None and not has_failed(self._answer):
            return
        now, decision, source = self._clock(), self._decision, self.migration.source
        reachable = len(self._mover.ranks(source.engine)) == source.ranks
        if self._answer is not None:
            late = self._answer.result is not None and self._answer.result.cause is Cause.DEADLINE
            self._unasked = self._unasked or (late and reachable and self._reachable)
            self._answer, self._say_at = None, now + AGAIN_S
        if decision is None or self.settled or self._unasked or now < self._say_at:
            return
        self._reachable = reachable
        said = Decision(decision.taken, decision.reason[:MAX_REASON_CHARACTERS], self.migration.content).encode()
        nothing: list[list[int]] = [[] for _ in self._pages]
        self._answer = self._mover.send(
            self.migration.decision_name, nothing, [], said, deadline_s=self._config.patience_s
        )
