"""The Ledger sums up the fate of every prompt token of every request; the sums must balance.

An engine reports a request's events: matched, admitted, computed (each chunk), withdrawn (a load that failed), its end,
and a prediction if there was any. A prompt counts once: a request that was retracted and admitted again is in other
sums.
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
    """Predicted hits against delivered ones, in tokens over first attempts with a prediction.

    `foreseen`: predicted and delivered. `missed`: predicted, not delivered. `unforeseen`: delivered beyond the
    prediction. A prefix has no holes, so one of the last two is 0 for each request.
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
        """Add the sums of `other`, which is not changed."""
        self.requests += other.requests
        self.foreseen_tokens += other.foreseen_tokens
        self.missed_tokens += other.missed_tokens
        self.unforeseen_tokens += other.unforeseen_tokens


@dataclass(slots=True)
class Totals:
    """The sums over attempts, for which both laws of an account hold."""

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
        """Tokens on the device without being computed, from any tier."""
        return self.device_tokens + self.host_tokens + self.storage_tokens + self.peer_tokens

    @property
    def hit_rate(self) -> float:
        """The credited share of all prompt tokens; 0 without prompts."""
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
        """Add the sums of `other`, which is not changed."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, tokens in other.lost.items():
            self.lost[reason] = self.lost.get(reason, 0) + tokens
        for by, sums in other.predictions.items():
            self.predictions.setdefault(by, PredictionTotals()).merge(sums)

    def check(self) -> None:
        """Raise LedgerError if a law of accounts does not hold for the sums. O(reasons)."""
        if self.attempts != self.finished + self.retracted + self.aborted:
            raise LedgerError(f"attempts are not finished + retracted + aborted: {self}")
        if self.reusable_tokens != self.credited_tokens + sum(self.lost.values()):
            raise LedgerError(f"reusable is not credited + lost: {self}")
        if self.prompt_tokens != self.credited_tokens + self.computed_tokens + self.abandoned_tokens:
            raise LedgerError(f"prompts are not credited + computed + abandoned: {self}")

    def as_data(self) -> dict[str, Any]:
        """Return the sums for JSON, with derived ones, and predictions if there were any."""
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
    """The handling of an event that does not balance; either way it changes no sum."""

    #: Raise LedgerError at the caller: for tests.
    RAISE = "raise"
    #: Count it in `Ledger.faults` and keep it as `Ledger.last_fault`: for production. An attempt that does not balance
    #: at its end is dropped, and is in no sum.
    COUNT = "count"


@dataclass(slots=True)
class Book:
    """The sums of one group: `first` attempts, and `again` after a retraction, which repeat work."""

    first: Totals = field(default_factory=Totals)
    again: Totals = field(default_factory=Totals)

    def check(self) -> None:
        """Raise LedgerError if the sums do not balance."""
        self.first.check()
        self.again.check()


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The books of attempts that ended within `seconds` from `start_s`."""

    start_s: float
    seconds: float
    books: Mapping[AccountGroup, Book]


class Ledger:
    """The accounts of open requests, and the sums of ended attempts by group and time window. Use it from one thread.

    An event that does not balance raises LedgerError, or is counted, as `fault` says; an end then returns None. Times
    are seconds of any one clock. The last `keep_windows` windows of `window_s` are kept, and the sums of all. `sink`
    gets every ended attempt that was admitted, for example `JsonLines.write`. `token_bytes`: bytes of KV of one token
    over all layers and components, by model.

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
        #: Requests that ended before admission: their prompt tokens are in no sum.
        self.never_admitted = 0
        #: Requests that ended between a retraction and the next admission: their attempts are in the sums, this end is
        #: not.
        self.never_resumed = 0
        #: Hints by (group, action, `met` or the reason of refusal).
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
        """Return the number of requests that have not ended."""
        return len(self._open)

    def account(self, request: RequestId) -> Account:
        """Return the account of an open request. Raises LedgerError for a request that is not open."""
        return self._account(request).frozen()

    def matched(
        self,
        request: RequestId,
        prompt_tokens: int,
        reusable_tokens: int,
        now_s: float,
        group: AccountGroup = EVERYBODY,
    ) -> None:
        """Open a request, or replace its lookup before admission: `reusable_tokens` were found, over all tiers."""
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
        """Record how much of the prompt was predicted to hit: once, before the first admission."""
        try:
            self._account(request).predicted(prediction)
        except LedgerError as error:
            self._refuse(error)

    def admitted(self, request: RequestId, credit: Credit, lost: Losses = NOTHING_LOST) -> None:
        """Begin an attempt with `credit` on the device; `lost` is the rest of the match."""
        try:
            self._account(request).admitted(credit, lost)
        except LedgerError as error:
            self._refuse(error)

    def computed(self, request: RequestId, tokens: int) -> None:
        """Count a computed chunk of the prompt."""
        try:
            self._account(request).computed(tokens)
        except LedgerError as error:
            self._refuse(error)

    def withdrawn(self, request: RequestId, credit: Credit, reason: Loss) -> None:
        """Turn credited tokens that are not on the device after all into lost ones, to be computed."""
        try:
            self._account(request).withdrawn(credit, member(Loss, reason, "reason", LedgerError))
        except LedgerError as error:
            self._refuse(error)

    def finished(self, request: RequestId, now_s: float, concurrent_tokens: int = 0) -> Account | None:
        """End a request that is answered; returns its account.

        `concurrent_tokens` of those it computed were in the tree already when it inserted them.
        """
        return self._end(request, AttemptPhase.FINISHED, now_s, concurrent_tokens)

    def retracted(self, request: RequestId, now_s: float) -> Account | None:
        """End an attempt whose pages are gone; the request waits to be matched again. Returns the attempt's account."""
        over = self._end(request, AttemptPhase.RETRACTED, now_s)
        if over:
            self._open[request] = OpenAccount(request, over.group, over.attempt, now_s)
        return over

    def aborted(self, request: RequestId, now_s: float) -> Account | None:
        """End a request without an answer, at any time after its first match. Returns its account."""
        return self._end(request, AttemptPhase.ABORTED, now_s)

    def hinted(self, action: str, outcome: str, group: AccountGroup = EVERYBODY) -> None:
        """Count a hint. `action` and `outcome` are metric labels: keep their values few."""
        self.hints[group, action, outcome] += 1

    def total(self, group: AccountGroup | None = None) -> Book:
        """Return the sums of all ended attempts, of one group or of all, as a copy."""
        whole = Book()
        for books in (self._closed, self._books):
            for name, book in books.items():
                if group is None or name == group:
                    whole.first.merge(book.first)
                    whole.again.merge(book.again)
        return whole

    def saved_bytes(self, group: AccountGroup) -> int:
        """Return the bytes of KV that were credited and so not computed; 0 for a model without `token_bytes`."""
        book = self.total(group)
        tokens = book.first.credited_tokens + book.again.credited_tokens
        return tokens * self._token_bytes.get(group.model, 0)

    def groups(self) -> tuple[AccountGroup, ...]:
        """Return the groups with an ended attempt, sorted by name."""
        return tuple(sorted({*self._closed, *self._books}, key=lambda group: (group.tenant, group.model)))

    def windows(self) -> tuple[TimeWindow, ...]:
        """Return the kept windows in which an attempt ended, oldest first; the last one is still open."""
        return (*self._windows, self._now) if self._books else tuple(self._windows)

    def check(self) -> None:
        """Raise LedgerError if an open account, a window or a sum does not balance. O(open requests + windows)."""
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
        """Close the window, and open that of `now_s`. A clock that goes back stays in the open window."""
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
