"""A PeerTier lends one rank's host pages to other engines, and reads theirs, by a mover over its host pools.

A thread drives the mover, so that peers are answered while this engine computes. The engine's own thread reports pages
that came to the host and pages about to leave; `freed` returns once no peer can mistake their new bytes for the old KV.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy.typing as npt
from msgspec.structs import replace as replace_fields

from kvmover.cache.peers.loans import MOST_LOANS, HostInventory, Loan, Loans
from kvmover.cache.peers.questions import PeerAnswer, PeerMiss, PeerQuestion, question_of
from kvmover.cache.prefix import RadixKey
from kvmover.errors import PeerUnknown, PlanError, TierError, TransportError
from kvmover.fields import settle_whole
from kvmover.layout import Pool
from kvmover.transfer import Ending, Model, Mover, MoverConfig, Pace, Place, Progress, Transfer
from kvmover.transfer.arguments import page_tables
from kvmover.transfer.protocol.wire import Query, Verb
from kvmover.transport import Transport

#: The thread polls more often than one whose engine calls it, as peers wait for its answers. An idle poll takes 3 us,
#: and a nap of 1 ms with the thread's wake-up 2 % of a core less than NIXL's own thread.
_PACE = Pace(share=0.1, open_s=0.25e-3, idle_s=1e-3)


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """The engines that a rank asks, and its times in seconds.

    `engines`: by name, in the same order on all ranks, unless a request names its source; at most `most_asked` a
    prompt. `ask_s`: wait for an answer; an engine without one holds no page. `quiet_s`: such an engine is not asked
    again. `lend_s`: wait for a borrower to read. `read_s`: deadline of a read. `most_loans`: see `Loans`.

    Raises TierError for a time not above 0, or an engine named twice.
    """

    engines: tuple[str, ...] = ()
    ask_s: float = 0.2
    quiet_s: float = 1.0
    lend_s: float = 5.0
    read_s: float = 10.0
    most_loans: int = MOST_LOANS
    most_asked: int = 16

    def __post_init__(self) -> None:
        if min(self.ask_s, self.quiet_s, self.lend_s, self.read_s) <= 0 or len({*self.engines}) < len(self.engines):
            raise TierError(f"seconds that are not above 0, or an engine twice: {self}")
        settle_whole(self, "terms of peers", TierError, most_loans=1, most_asked=1)


@dataclass(frozen=True, slots=True)
class Lent:
    """The numbers of host pages that may be lent, and of open loans."""

    pages: int
    loans: int


@dataclass(frozen=True, slots=True)
class PeerPrefix:
    """The pages of a prompt to ask for, from `first_tokens` up to `limit_tokens`."""

    key: RadixKey
    first_tokens: int
    limit_tokens: int

    def hashes(self, page_tokens: int) -> tuple[int, list[bytes]]:
        """Return the first page's number and the hashes of pages of `page_tokens` tokens."""
        first = self.first_tokens // page_tokens
        pages = self.limit_tokens // page_tokens
        return first, self.key.page_hashes(page_tokens * self.key.units)[first:pages]


@dataclass(slots=True, eq=False)
class PeerLook:
    """A lookup of all engines of a question, with `answers` of each."""

    question: PeerQuestion
    prefix: PeerPrefix
    ended: Callable[[Sequence[PeerAnswer]], None]
    answers: list[PeerAnswer]
    waits: int
    told: bool = False


@dataclass(slots=True, eq=False)
class PeerRead:
    """A read. `ended` gets its bytes, or the error; `stopping` is polled. It may write until `over`."""

    stopping: Callable[[], bool]
    ended: Callable[[int | BaseException], None]
    transfer: Transfer | None = None
    error: BaseException | None = None
    stopped: bool = False

    @property
    def known(self) -> bool:
        """Returns True if it has ended."""
        return self.error is not None or (self.transfer is not None and self.transfer.ended)

    @property
    def over(self) -> bool:
        """Returns True if ended, and writing no more."""
        return self.known and (self.transfer is None or not self.transfer.quarantined)


class PeerTier:
    """A peer tier of one rank, driven from the engine's thread. The pools are the caller's, and outlive it.

    `engines`: those asked where a request names no source; assign to replace them. `meet(engine, told)`, if there is
    one, connects a named engine that is not connected, in a thread of its own, and tells why it could not.
    """

    def __init__(
        self,
        transport: Transport,
        model: str,
        place: Place,
        pools: Sequence[Pool],
        terms: PeerTerms,
        config: MoverConfig | None = None,
        weights: str = "",
    ) -> None:
        """Start a mover over the host `pools`, which always pulls: a loan may be recalled until read.

        Peers of other `weights` are refused; if "", of another `model`. Raises TierError for a component without every
        page of a prefix.
        """
        components = tuple(pool.spec.component for pool in pools)
        for component in components:
            if component.window is not None or component.states:
                raise TierError(f"{component.name} is not kept for every page of a prompt; peers share what is")
        config = replace(config or MoverConfig(silence_s=2.0, drain_s=0.5), verb=Verb.PULL)
        self.terms, self.engine, self.engines = terms, place.engine, terms.engines
        self.meet: Callable[[str, Callable[[PeerMiss | None], None]], None] | None = None
        self.pools = len(pools)
        self._lock = threading.Lock()
        self._inventory, self._loans = HostInventory(), Loans(terms.most_loans)
        self._sent: dict[str, Transfer] = {}
        self._quiet: dict[str, float] = {}
        self._over: deque[Callable[[], None]] = deque()
        self._news = threading.Event()
        self._looks = 0
        self._reads: list[PeerRead] = []
        self._model = Model(model, components, weights)
        self._mover = Mover(transport, self._model, place, pools, config)
        self._mover.watch(self._ended)
        asks = self._mover.asks
        self._progress = Progress(self._mover, _PACE)
        asks.holder = self._answer

    # Peers

    @property
    def card(self) -> bytes:
        """Returns the card by which a borrowing rank connects."""
        return self._progress.card

    def rejoin(self, make: Callable[[], Transport], weights: str, reason: str) -> None:
        """Drop the inventory, end loans, lookups and reads for `reason`, and join anew with other `weights`.

        `make` returns the new transport; `card` changes, and peers must be connected anew. Waits until peers let go of
        pages, or their time is up.
        """
        with self._lock:
            self._inventory = HostInventory()
        self._progress.rejoin(make, replace_fields(self._model, weights=weights), reason)

    def connect(self, card: bytes) -> str:
        """Connect a rank to read from. Returns its name. Raises PeerRefused for another model."""
        return self._progress.submit(lambda mover: mover.connect(card)).result()

    def disconnect(self, engine: str) -> None:
        """Disconnect an engine out of service, and stop dialling it."""

        def part(mover: Mover) -> None:
            mover.disconnect(engine)
            self._quiet.pop(engine, None)

        self._progress.submit(part).result()

    def ranks(self, engine: str) -> frozenset[int]:
        """Return the connected ranks of an engine."""
        return self._progress.submit(lambda mover: mover.ranks(engine)).result()

    # This rank's pages

    def came(self, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        """Offer host pages that are whole on all ranks."""
        with self._lock:
            self._inventory.add(hashes, ids)

    def freed(self, ids: Sequence[int]) -> None:
        """Withdraw host pages about to be reused. Returns once their borrowers are told to discard them."""
        with self._lock:
            self._inventory.drop(ids)
            names = self._loans.recalled(ids)
        if names:
            try:
                self._progress.submit(lambda mover: self._recall(mover, names)).result()
            except TransportError:  # a closed mover lends no page
                return

    # Peers' pages

    def question(self, request: str, page_hash: bytes, source: str | None = None) -> PeerQuestion:
        """Returns the question for a prompt whose first page has this hash: see `question_of`."""
        return question_of(request, page_hash, self.engines, self.terms.most_asked, source)

    def look(self, question: PeerQuestion, prefix: PeerPrefix, ended: Callable[[Sequence[PeerAnswer]], None]) -> None:
        """Ask the engines of a question for a prefix.

        `poll` gives `ended` the leading tokens readable from each, in the order of the question.
        """
        count = len(question.engines)
        look = PeerLook(question, prefix, ended, [PeerAnswer(0, PeerMiss.UNREACHABLE)] * count, count)
        self._looks += 1
        self._call(lambda mover: self._ask_all(mover, look), lambda error: self._looked(look))

    def read(
        self,
        question: PeerQuestion,
        source: int,
        positions: range,
        tables: Sequence[npt.ArrayLike],
        read: PeerRead,
    ) -> None:
        """Read `positions` that engine number `source` of a question offered into host pages.

        `tables`: host page ids a pool, from the prompt's first page on; copied. The pages are the read's until it is
        over. Raises PlanError for malformed tables.
        """
        into = page_tables(tables)
        engine = question.engines[source]
        name = _name(self.engine, question.request, engine)
        self._reads.append(read)

        def begin(mover: Mover) -> Transfer:
            for other in question.engines:
                if other != engine:
                    mover.asks.decline(_name(self.engine, question.request, other))
            mover.asks.take(name)
            return mover.receive(name, engine, positions, into, deadline_s=self.terms.read_s)

        def begun(future: Future[Transfer]) -> None:
            read.error = future.exception()
            if read.error is None:
                read.transfer = future.result()
            else:
                self._news.set()

        try:
            self._progress.begin(begin).add_done_callback(begun)
        except TransportError as error:
            read.error = error

    def decline(self, question: PeerQuestion) -> None:
        """Decline all pages offered to a question."""
        names = [_name(self.engine, question.request, engine) for engine in question.engines]
        self._call(lambda mover: [mover.asks.decline(name) for name in names])

    # Progress

    def poll(self) -> None:
        """Report ended lookups and reads, and stop reads that are `stopping`."""
        self._news.clear()
        while self._over:
            self._over.popleft()()
        for read in list(self._reads):
            if read.known:
                self._reads.remove(read)
                read.ended(_outcome(read))
            elif read.stopping() and not read.stopped and read.transfer is not None:
                read.stopped = True
                transfer = read.transfer
                self._call(partial(_stop, transfer))

    @property
    def queued(self) -> int:
        """Returns the open lookups and reads."""
        return self._looks + len(self._reads)

    def wait(self, seconds: float) -> None:
        """Sleep at most `seconds`, until a result may have come."""
        self._news.wait(seconds)

    def counts(self) -> Lent:
        """Return lendable pages and open loans."""
        with self._lock:
            return Lent(len(self._inventory), len(self._loans))

    def check(self) -> None:
        """Raise InvariantBroken if inventory or loans do not add up."""
        with self._lock:
            self._inventory.check()
            self._loans.check()

    def close(self) -> None:
        """End the thread and the mover; open reads fail."""
        self._progress.close()

    # In the mover's thread

    def _answer(self, place: Place, query: Query) -> int:
        """Answer a query; one without hashes ends its loan."""
        if not query.hashes:
            with self._lock:
                known = self._loans.lends(place.engine, query.request)
            if known:
                self._recall(self._mover, {query.request})
            return 0
        with self._lock:
            pages, loan = self._loans.asked(place.engine, query.request, query.first, query.hashes, self._inventory)
        if loan is not None and not self._lend(loan):
            return 0
        return pages

    def _lend(self, loan: Loan) -> bool:
        table = [-1] * loan.first + list(loan.ids)
        tables, seconds = [table] * self.pools, self.terms.lend_s
        begun = self._progress.begin(lambda mover: mover.send(loan.request, tables, deadline_s=seconds))
        error = begun.exception()  # known already in this thread
        if error is None:
            self._sent[loan.request] = begun.result()
            return True
        with self._lock:
            self._loans.over(loan.request)
        if isinstance(error, PlanError):  # another request of this name has not ended
            return False
        raise error

    def _recall(self, mover: Mover, names: set[str]) -> None:
        for name in names:
            transfer = self._sent.get(name)
            if transfer is not None:
                mover.abort(transfer, "its lender needs the pages")
            with self._lock:
                self._loans.over(name)

    def _ended(self, ending: Ending) -> None:
        if ending.verb == "send":
            self._sent.pop(ending.request, None)
            with self._lock:
                self._loans.over(ending.request)
        else:
            self._news.set()

    def _ask_all(self, mover: Mover, look: PeerLook) -> None:
        if not look.question.engines:
            self._looked(look)
        for number in range(len(look.question.engines)):
            try:
                self._ask(mover, look, number)
            except PeerUnknown:
                self._introduce(look, number)

    def _ask(self, mover: Mover, look: PeerLook, number: int) -> None:
        """Ask one engine; a quiet one counts as 0. Raises PeerUnknown unless it is connected."""
        engine, prefix = look.question.engines[number], look.prefix
        if engine == self.engine:
            self._answered(look, number, PeerAnswer(0, PeerMiss.NEEDLESS))
            return
        fleet = mover.asks.fleet(engine)
        page = fleet.page_tokens * fleet.cp
        first, hashes = prefix.hashes(page)
        if not hashes:
            self._answered(look, number, PeerAnswer(0, PeerMiss.NEEDLESS))
            return
        if self._quiet.get(engine, 0.0) > time.monotonic():
            self._answered(look, number, PeerAnswer(0, PeerMiss.UNREACHABLE))
            return
        name, told = _name(self.engine, look.question.request, engine), partial(self._said, look, number, page)
        mover.asks.begin(name, engine, first, hashes, self.terms.ask_s, told)

    def _introduce(self, look: PeerLook, number: int) -> None:
        """Ask an engine that a request named once it is connected. Others are met without haste, and count as 0."""
        unknown = PeerAnswer(0, PeerMiss.UNREACHABLE)
        if look.question.source is None or self.meet is None:
            self._answered(look, number, unknown)
            return

        def met(miss: PeerMiss | None) -> None:
            if miss is None:
                self._call(
                    lambda mover: self._ask(mover, look, number), lambda error: self._answered(look, number, unknown)
                )
            else:
                self._answered(look, number, PeerAnswer(0, miss))

        self.meet(look.question.engines[number], met)

    def _said(self, look: PeerLook, number: int, page_tokens: int, pages: int | None) -> None:
        if pages is None:
            self._quiet[look.question.engines[number]] = time.monotonic() + self.terms.quiet_s
            self._answered(look, number, PeerAnswer(0, PeerMiss.UNREACHABLE))
            return
        tokens = min(pages * page_tokens, look.prefix.limit_tokens)
        self._answered(look, number, PeerAnswer(tokens, None if tokens else PeerMiss.ABSENT))

    def _answered(self, look: PeerLook, number: int, answer: PeerAnswer) -> None:
        look.answers[number] = answer
        look.waits -= 1
        if not look.waits:
            self._looked(look)

    def _looked(self, look: PeerLook) -> None:
        if look.told:
            return
        look.told = True

        def over() -> None:
            self._looks -= 1
            look.ended(look.answers)

        self._over.append(over)
        self._news.set()

    def _call(
        self, call: Callable[[Mover], object], failed: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        """Run `call` in the mover's thread; `failed` gets its exception."""

        def done(future: Future[object]) -> None:
            error = future.exception()
            if error is not None:
                failed(error)

        try:
            self._progress.submit(call).add_done_callback(done)
        except TransportError as error:
            failed(error)


def _stop(transfer: Transfer, mover: Mover) -> None:
    mover.abort(transfer, "its time is up")


def _name(own: str, request: str, engine: str) -> str:
    return f"{own}/{request}@{engine}"


def _outcome(read: PeerRead) -> int | BaseException:
    if read.error is not None:
        return read.error
    assert read.transfer is not None
    result = read.transfer.result
    assert result is not None
    if result.reason is not None:
        return TransportError(result.reason)
    return result.nbytes
