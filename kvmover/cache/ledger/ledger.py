"""The Ledger sums up what became of every prompt token of every request; the sums must balance.

An engine tells it six things of a request: matched, admitted, computed (each chunk), withdrawn (a load that failed),
and how it ended; and a seventh, what was predicted of it, where anybody did. A prompt is counted once: a request that
was retracted and admitted again is in other sums.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from kvmover.cache.ledger.account import (
    NOTHING_LOST,
    Account,
    AccountGroup,
    AttemptPhase,
    Credit,
    LedgerError,
    Loss,
    Losses,
    OpenAccount,
    Prediction,
    Predictor,
    RequestId,
)
from kvmover.fields import member


@dataclass(slots=True)
class PredictionTotals:
    """Predicted hits against delivered ones, over first attempts of which there was a prediction.

    `foreseen`: tokens that were predicted and delivered. `missed`: predicted, and not delivered. `unforeseen`:
    delivered beyond what was predicted. A prefix has no holes, so of a request one of the last two is 0.
    """

    requests: int = 0
    foreseen_tokens: int = 0
    missed_tokens: int = 0
    unforeseen_tokens: int = 0

    def add(self, predicted_tokens: int, delivered_tokens: int) -> None:
        """Count a request."""
        foreseen = min(predicted_tokens, delivered_tokens)
        self.requests += 1
        self.foreseen_tokens += foreseen
        self.missed_tokens += predicted_tokens - foreseen
        self.unforeseen_tokens += delivered_tokens - foreseen

    def merge(self, other: PredictionTotals) -> None:
        """Add the sums of `other`, which stays as it is."""
        self.requests += other.requests
        self.foreseen_tokens += other.foreseen_tokens
        self.missed_tokens += other.missed_tokens
        self.unforeseen_tokens += other.unforeseen_tokens


@dataclass(slots=True)
class Totals:
    """Sums over attempts. Both laws of an account hold for the sums."""

    attempts: int = 0
    finished: int = 0
    retracted: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    peer_tokens: int = 0
    computed_tokens: int = 0
    abandoned_tokens: int = 0
    lost: dict[Loss, int] = field(default_factory=dict[Loss, int])
    predictions: dict[Predictor, PredictionTotals] = field(default_factory=dict[Predictor, PredictionTotals])

    @property
    def credited_tokens(self) -> int:
        """On the device without being computed, from any tier."""
        return self.device_tokens + self.host_tokens + self.storage_tokens + self.peer_tokens

    @property
    def hit_rate(self) -> float:
        """Credited tokens of all prompt tokens; 0 where there are none."""
        return self.credited_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, account: Account) -> None:
        """Count an attempt that has ended."""
        self.attempts += 1
        self.prompt_tokens += account.prompt_tokens
        self.reusable_tokens += account.reusable_tokens
        self.device_tokens += account.device_tokens
        self.host_tokens += account.host_tokens
        self.storage_tokens += account.storage_tokens
        self.peer_tokens += account.peer_tokens
        self.computed_tokens += account.computed_tokens
        self.abandoned_tokens += account.abandoned_tokens
        if account.lost:
            for reason, tokens in account.lost.items():
                self.lost[reason] = self.lost.get(reason, 0) + tokens
        if account.prediction is not None:
            by = self.predictions.setdefault(account.prediction.by, PredictionTotals())
            by.add(account.prediction.tokens, account.credited_tokens)
        if account.phase is AttemptPhase.FINISHED:
            self.finished += 1
        elif account.phase is AttemptPhase.RETRACTED:
            self.retracted += 1
        else:
            self.aborted += 1

    def merge(self, other: Totals) -> None:
        """Add the sums of `other`, which stays as it is."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, tokens in other.lost.items():
            self.lost[reason] = self.lost.get(reason, 0) + tokens
        for by, sums in other.predictions.items():
            self.predictions.setdefault(by, PredictionTotals()).merge(sums)

    def check(self) -> None:
        """Raise LedgerError where a law of accounts does not hold for the sums. O(reasons)."""
        if self.attempts != self.finished + self.retracted + self.aborted:
            raise LedgerError(f"attempts are not finished + retracted + aborted: {self}")
        if self.reusable_tokens != self.credited_tokens + sum(self.lost.values()):
            raise LedgerError(f"reusable is not credited + lost: {self}")
        if self.prompt_tokens != self.credited_tokens + self.computed_tokens + self.abandoned_tokens:
            raise LedgerError(f"prompts are not credited + computed + abandoned: {self}")

    def as_data(self) -> dict[str, Any]:
        """For JSON, with the sums that follow from the others; predictions where there were any."""
        data = {
            **{name: getattr(self, name) for name in _NUMBERS},
            "hit_rate": round(self.hit_rate, 6),
            "losses": {str(reason): self.lost[reason] for reason in Loss if self.lost.get(reason)},
        }
        if self.predictions:
            data["predictions"] = {str(by): asdict(self.predictions[by]) for by in sorted(self.predictions)}
        return data


_NUMBERS = tuple(name for name in Totals.__dataclass_fields__ if name not in ("lost", "predictions"))


EVERYBODY = AccountGroup()


class FaultPolicy(Enum):
    """What becomes of an event that does not balance. It changes no account and no sum, either way."""

    #: LedgerError, at the caller: for tests.
    RAISE = "raise"
    #: `Ledger.faults` counts it, and `Ledger.last_fault` says which: for production. An attempt that does not balance
    #: at its end is dropped, as nobody will end it again; it is in no sum.
    COUNT = "count"


@dataclass(slots=True)
class Book:
    """Sums of one group: of first attempts, and of those after a retraction, which do their work again."""

    first: Totals = field(default_factory=Totals)
    again: Totals = field(default_factory=Totals)

    def check(self) -> None:
        """Raise LedgerError where sums do not balance."""
        self.first.check()
        self.again.check()


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Books of the attempts that ended within `seconds` from `start_s`."""

    start_s: float
    seconds: float
    books: Mapping[AccountGroup, Book]


class Ledger:
    """Accounts of open requests, and sums of ended attempts by group and by window of time.

    Times are seconds of any one clock. The last `keep_windows` windows of `window_s` are kept, and the sums of all.
    `sink` gets every ended attempt, for example `JsonLines.write`. `token_bytes` is the KV of one token, by the name of
    the model, over all layers and components. Use it from one thread.

    >>> ledger = Ledger()
    >>> ledger.matched("r", prompt_tokens=100, reusable_tokens=64, now_s=0.0)
    >>> ledger.admitted("r", Credit(device_tokens=32, host_tokens=16), {Loss.LATE: 16})
    >>> ledger.computed("r", 52)
    >>> ledger.finished("r", now_s=1.0).computed_tokens
    52
    >>> ledger.total().first.hit_rate
    0.48
    """

    def __init__(
        self,
        fault: FaultPolicy = FaultPolicy.RAISE,
        window_s: float = 60.0,
        keep_windows: int = 1440,
        sink: Callable[[Account], object] | None = None,
        token_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.faults = 0
        self.last_fault: LedgerError | None = None
        #: Requests that ended without having been admitted: they have no prompt tokens in any sum.
        self.never_admitted = 0
        #: Requests that were retracted and ended before they were admitted again: their attempts are in the sums, and
        #: this end is in none.
        self.never_resumed = 0
        #: Hints by what became of them: (group, action, `met` or why not).
        self.hints = Counter[tuple[AccountGroup, str, str]]()
        self.window_s = window_s
        self._fault = member(FaultPolicy, fault, "a ledger's fault", LedgerError)
        self._sink, self._token_bytes = sink, token_bytes
        self._open = dict[RequestId, OpenAccount]()
        self._closed = dict[AccountGroup, Book]()
        self._now = TimeWindow(0.0, window_s, {})
        self._books = dict[AccountGroup, Book]()
        self._windows = deque[TimeWindow](maxlen=keep_windows)

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def account(self, request: RequestId) -> Account:
        """Of a request that has not ended. Raises LedgerError when it has, or never was."""
        return self._account(request).frozen()

    def matched(
        self,
        request: RequestId,
        prompt_tokens: int,
        reusable_tokens: int,
        now_s: float,
        group: AccountGroup = EVERYBODY,
    ) -> None:
        """A lookup found `reusable_tokens`, on any tier. May come again until admission; the last one counts."""
        found = self._open.get(request)
        try:
            if found is not None:
                found.matched(prompt_tokens, reusable_tokens)
                return
            found = OpenAccount(request, group, 0, now_s)
            found.matched(prompt_tokens, reusable_tokens)
            self._open[request] = found
        except LedgerError as error:
            self._refuse(error)

    def predicted(self, request: RequestId, prediction: Prediction) -> None:
        """Before admission to a first attempt, and once: how much of the prompt was to be a hit, and who said so."""
        try:
            self._account(request).predicted(prediction)
        except LedgerError as error:
            self._refuse(error)

    def admitted(self, request: RequestId, credit: Credit, lost: Losses = NOTHING_LOST) -> None:
        """An attempt begins with `credit` on the device; `lost` is the rest of what the match found reusable."""
        try:
            self._account(request).admitted(credit, lost)
        except LedgerError as error:
            self._refuse(error)

    def computed(self, request: RequestId, tokens: int) -> None:
        """A chunk of the prompt was computed."""
        try:
            self._account(request).computed(tokens)
        except LedgerError as error:
            self._refuse(error)

    def withdrawn(self, request: RequestId, credit: Credit, reason: Loss) -> None:
        """Credited tokens are not on the device after all; they are to be computed."""
        try:
            self._account(request).withdrawn(credit, member(Loss, reason, "reason", LedgerError))
        except LedgerError as error:
            self._refuse(error)

    def finished(self, request: RequestId, now_s: float, concurrent_tokens: int = 0) -> Account | None:
        """The request is answered. `concurrent_tokens` of those it computed were in the tree already when it came."""
        return self._end(request, AttemptPhase.FINISHED, now_s, concurrent_tokens)

    def retracted(self, request: RequestId, now_s: float) -> Account | None:
        """The attempt is over and its pages are gone; the request waits to be matched again."""
        over = self._end(request, AttemptPhase.RETRACTED, now_s)
        if over:
            self._open[request] = OpenAccount(request, over.group, over.attempt, now_s)
        return over

    def aborted(self, request: RequestId, now_s: float) -> Account | None:
        """The request is over without an answer, at any time after its first match."""
        return self._end(request, AttemptPhase.ABORTED, now_s)

    def hinted(self, action: str, outcome: str, group: AccountGroup = EVERYBODY) -> None:
        """A hint was met, or refused: `action` and `outcome` are of few words each, for they are labels."""
        self.hints[group, action, outcome] += 1

    def total(self, group: AccountGroup | None = None) -> Book:
        """Sums of all ended attempts, of one group or of all, as a copy."""
        whole = Book()
        for books in (self._closed, self._books):
            for name, book in books.items():
                if group is None or name == group:
                    whole.first.merge(book.first)
                    whole.again.merge(book.again)
        return whole

    def saved_bytes(self, group: AccountGroup) -> int:
        """KV that was not computed, as every credited token is one. 0 for a model whose `token_bytes` nobody gave."""
        book = self.total(group)
        tokens = book.first.credited_tokens + book.again.credited_tokens
        return tokens * self._token_bytes.get(group.model, 0)

    def groups(self) -> tuple[AccountGroup, ...]:
        """All that ended an attempt, in order of names."""
        return tuple(sorted({*self._closed, *self._books}, key=lambda group: (group.tenant, group.model)))

    def windows(self) -> tuple[TimeWindow, ...]:
        """Kept windows in which an attempt ended, oldest first; the last one is still open."""
        return (*self._windows, self._now) if self._books else tuple(self._windows)

    def check(self) -> None:
        """Raise LedgerError where an open account, a window or a sum does not balance. O(open requests + windows)."""
        for account in self._open.values():
            account.frozen().check()
        for window in self.windows():
            for book in window.books.values():
                book.check()
        for group in self.groups():
            book = self.total(group)
            book.check()
            if book.again.attempts > book.first.retracted + book.again.retracted:
                raise LedgerError(f"{group}: more attempts came again than were retracted: {book}")

    def _account(self, request: RequestId) -> OpenAccount:
        found = self._open.get(request)
        if found is None:
            raise LedgerError(f"request {request} is not open")
        return found

    def _end(self, request: RequestId, phase: AttemptPhase, now_s: float, concurrent_tokens: int = 0) -> Account | None:
        try:
            before = self._account(request)
            over = before.ended(phase, now_s, concurrent_tokens)
        except LedgerError as error:
            self._refuse(error)
            self._open.pop(request, None)
            return None
        del self._open[request]
        if before.phase is not AttemptPhase.ADMITTED:
            if before.attempt:
                self.never_resumed += 1
            else:
                self.never_admitted += 1
            return over
        if now_s >= self._now.start_s + self.window_s or not self._books:
            self._turn(now_s)
        book = self._books.get(over.group)
        if book is None:
            book = self._books[over.group] = Book()
        (book.first if over.attempt == 1 else book.again).add(over)
        if self._sink:
            self._sink(over)
        return over

    def _turn(self, now_s: float) -> None:
        """Close the window, and open the one of `now_s`. A clock that goes back stays in the window that is open."""
        if self._books:
            self._windows.append(self._now)
            for group, book in self._books.items():
                whole = self._closed.setdefault(group, Book())
                whole.first.merge(book.first)
                whole.again.merge(book.again)
        self._books = dict[AccountGroup, Book]()
        self._now = TimeWindow(now_s // self.window_s * self.window_s, self.window_s, self._books)

    def _refuse(self, error: LedgerError) -> None:
        if self._fault is FaultPolicy.RAISE:
            raise error
        self.faults += 1
        self.last_fault = error
