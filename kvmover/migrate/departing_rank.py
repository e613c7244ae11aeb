"""A DepartingRank and its Mover move a running request from one rank of the source to another engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmover.cache.tiers import Consensus, LocalConsensus
from kvmover.errors import PlanError, ProtocolError
from kvmover.migrate import departure
from kvmover.migrate.departure import (
    AnnounceRound,
    CopyRound,
    Decided,
    DepartureAction,
    DepartureEvent,
    DeparturePhase,
    HandOver,
    Withdraw,
    Wrote,
)
from kvmover.migrate.migration import Announcement, Decision, Migration, check_payload
from kvmover.migrate.migration_events import PartnerEnded, RoundFailed, RoundLanded
from kvmover.migrate.partners import AGAIN_S, Partners, has_failed, said_in
from kvmover.migrate.rounds import MigrationConfig, Round
from kvmover.transfer.events import Cancel
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.content import disagreement
from kvmover.transfer.result import Gate, Passed, Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A running request between two steps, once `event` has passed (None: now).

    Rows of `tokens` tokens are in `pages`, one table a component. `payload`: the engine's data for continuing
    elsewhere.
    """

    tokens: int
    pages: Sequence[npt.ArrayLike]
    payload: bytes = b""
    event: Passed | None = None


class DepartingRank:
    """A migration at one rank of the source. All ranks make the same calls in the same order, and agree by `agree`.

    Each step poll the mover, then this, until it is `settled`. Between two steps report the written tokens (`wrote`),
    and compute at most `may_write` more. If `phase` is GONE the request is the target's; if it is BACK, for `reason`,
    it is still this engine's, and lost nothing. The request's pages are read while `holds_pages`: until then a page
    that leaves a window must not be reused. Raises PeerUnknown if a rank of the target is not connected.
    """

    def __init__(
        self,
        mover: Mover,
        migration: Migration,
        now: Checkpoint,
        config: MigrationConfig | None = None,
        agree: Consensus | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if now.tokens != migration.tokens:
            name, begins = migration.request, migration.tokens
            raise PlanError(f"{name} has {now.tokens} tokens, and its migration begins at {begins}")
        self.migration = migration
        self._mover, self._config, self._clock = mover, config or MigrationConfig(), clock
        self._agree = agree or LocalConsensus()
        self._partners = Partners.of(mover, migration.target)
        self._now = now
        self._rounds: list[Transfer] = []
        self._announcements: list[Transfer] = []
        self._decision: Transfer | None = None
        self._ask_at, self._back_at = -np.inf, np.inf
        self.settled = False
        self._state, actions = departure.begin(now.tokens)
        self._listen()
        self._act(actions)

    @property
    def phase(self) -> DeparturePhase:
        """Returns the progress, at the end the side with the request."""
        return self._state.phase

    @property
    def reason(self) -> str | None:
        """Returns why the request came back."""
        return self._state.reason

    @property
    def may_write(self) -> int:
        """Returns the further tokens that may be computed here."""
        return self._state.may_write

    @property
    def landed_tokens(self) -> int:
        """Returns the leading tokens in the target's pages, of rounds that ended."""
        state = self._state
        return state.round.stop if state.phase is DeparturePhase.GONE else state.round.start

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Returns the rounds' transfers so far, in order."""
        return tuple(self._rounds)

    @property
    def holds_pages(self) -> bool:
        """Returns True if a transfer may still read the pages."""
        return any(not transfer.ended or transfer.quarantined for transfer in self._rounds)

    def wrote(self, now: Checkpoint) -> None:
        """Report a step's end. Raises PlanError for more tokens than `may_write`, or fewer than before."""
        check_payload(now.payload)
        before, self._now = self._now, now
        self._step(Wrote(now.tokens))
        if self._state.round.last and not self._rounds[-1].ended and now.tokens > before.tokens:
            more = [np.asarray(b)[len(np.asarray(a)) :] for a, b in zip(before.pages, now.pages, strict=True)]
            self._mover.produced(self._rounds[-1], Gate(now.event, tokens=now.tokens), more)

    def keep(self, reason: str) -> None:
        """Take the request back, or report its end, unless handed over."""
        self._step(Cancel(reason))

    def poll(self) -> DeparturePhase:
        """Advance by the transfers' results, in one round of `agree`. Returns the phase."""
        if self.settled:
            return self.phase
        agreed = self._agree.minimum(self._votes())
        if agreed is None:
            return self.phase
        number, other = self._state.round.number, -int(agreed[1])
        landed, sound, decided, lives, patient = map(bool, agreed[2:].tolist())
        if not int(agreed[0]) == other == number:
            pass  # ranks agreed late: the round is over
        elif landed:
            self._step(RoundLanded(number))
        elif not sound:
            self._step(RoundFailed(_why(self._rounds[-1])))
        if decided:
            assert self._decision is not None
            self._step(Decided(self._decision_in(said_in(self._decision))))
        elif not lives:
            self._step(PartnerEnded(f"{self.migration.target.engine} is dead"))
        if self.phase is DeparturePhase.BACK:
            self._back_at = min(self._back_at, self._clock())
        self.settled = self._state.ended and (decided or not lives or not patient)
        if not decided:
            self._listen()
        return self.phase

    def _votes(self) -> npt.NDArray[np.int64]:
        current, decision = self._rounds[-1].result, self._decision.result if self._decision else None
        lives = self._partners.live(self._clock())
        patient = self._clock() < self._back_at + self._config.patience_s
        landed, decided = (each is not None and each.landed for each in (current, decision))
        number, sound = self._state.round.number, current is None or landed
        return np.array([number, -number, landed, sound, decided, lives, patient], np.int64)

    def _step(self, event: DepartureEvent) -> None:
        self._state, actions = departure.step(self._config, self._state, event)
        self._state.check()
        self._act(actions)

    def _act(self, actions: Sequence[DepartureAction]) -> None:
        for action in actions:
            match action:
                case CopyRound(round_):
                    self._copy(round_)
                case AnnounceRound(round_):
                    now, name = self._now, self.migration.announcement_name(round_.number)
                    said = Announcement(round_, now.tokens, now.payload).encode()
                    content, no_pages = self.migration.content, [list[int]() for _ in now.pages]
                    self._announcements.append(self._mover.send(name, no_pages, [], said, content=content))
                case HandOver():
                    if not self._rounds[-1].ended:
                        self._mover.attach(self._rounds[-1], self._now.payload)
                case Withdraw(reason):
                    for transfer in (*self._rounds, *self._announcements):
                        if not transfer.ended:
                            self._mover.abort(transfer, reason)

    def _copy(self, round_: Round) -> None:
        now, name = self._now, self.migration.round_name(round_.number)
        gate, aux = Gate(now.event, tokens=now.tokens), None if round_.last else b""
        content = self.migration.content_of(round_.stop)
        self._rounds.append(self._mover.send(name, now.pages, [gate], aux, content=content))

    def _listen(self) -> None:
        asked, now = self._decision, self._clock()
        if self.settled:
            if asked is not None and not asked.ended:
                self._mover.abort(asked, "the target is dead, or has not said for too long")
            return
        if asked is not None and not has_failed(asked):
            return
        if asked is not None:
            self._decision, self._ask_at = None, now + AGAIN_S
        target, name = self.migration.target, self.migration.decision_name
        if now < self._ask_at or len(self._mover.ranks(target.engine)) < target.ranks:
            return
        self._decision = self._mover.receive(
            name, target.engine, range(0), None, target.everyone, self._config.patience_s
        )

    def _decision_in(self, said: bytes) -> Decision:
        """Decode the decision; an invalid one, or one on other content, declines."""
        try:
            decision = Decision.decode(said)
        except ProtocolError as error:
            return Decision(taken=False, reason=str(error))
        unlike = disagreement(self.migration.content, decision.content, self._mover.config.identity)
        return Decision(taken=False, reason=unlike) if decision.taken and unlike is not None else decision


def _why(transfer: Transfer) -> str:
    return (transfer.result.reason if transfer.result else None) or "a round failed on another rank"
