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

    `engines`: by name, in the same order on all ranks. `ask_s`: wait for an answer; an engine without one holds no
    page. `quiet_s`: such an engine is not asked again. `lend_s`: wait for a borrower to read. `read_s`: deadline of a
    read. `most_loans`: see `Loans`.

    Raises TierError for a time not above 0, or an engine named twice.
    """

    engines: tuple[str, ...] = ()
    ask_s: float = 0.2
    quiet_s: float = 1.0
    lend_s: float = 5.0
    read_s: float = 10.0
    most_loans: int = MOST_LOANS

    def __post_init__(self) -> None:
        if min(self.ask_s, self.quiet_s, self.lend_s, self.read_s) <= 0 or len({*self.engines}) < len(self.engines):
            raise TierError(f"seconds that are not above 0, or an engine twice: {self}")
        settle_whole(self, "terms of peers", TierError, most_loans=1)


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
    """A lookup of all engines. `tokens` [engine]: the prompt's length readable from it."""

    tokens: list[int]
    waits: int
    ended: Callable[[Sequence[int]], None]
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
    """A peer tier of one rank, driven from the engine's thread. The pools are the caller's, and outlive it."""

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
        self.terms, self.engine = terms, place.engine
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

    def look(self, request: str, prefix: PeerPrefix, ended: Callable[[Sequence[int]], None]) -> None:
        """Ask all engines for a prefix, by a `request` unique in this engine.

        `poll` gives `ended` the leading tokens readable from each, in the order of the terms.
        """
        look = PeerLook([0] * len(self.terms.engines), len(self.terms.engines), ended)
        self._looks += 1
        self._call(lambda mover: self._ask(mover, request, prefix, look), lambda error: self._looked(look))

    def read(
        self,
        request: str,
        source: int,
        positions: range,
        tables: Sequence[npt.ArrayLike],
        read: PeerRead,
    ) -> None:
        """Read `positions` that engine number `source` offered as `request` into host pages.

        `tables`: host page ids a pool, from the prompt's first page on; copied. The pages are the read's until it is
        over. Raises PlanError for malformed tables.
        """
        into = page_tables(tables)
        engine = self.terms.engines[source]
        name = _name(self.engine, request, engine)
        self._reads.append(read)

        def begin(mover: Mover) -> Transfer:
            for number, other in enumerate(self.terms.engines):
                if number != source:
                    mover.asks.decline(_name(self.engine, request, other))
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

    def decline(self, request: str) -> None:
        """Decline all pages offered as `request`."""
        names = [_name(self.engine, request, engine) for engine in self.terms.engines]
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

    def _ask(self, mover: Mover, request: str, prefix: PeerPrefix, look: PeerLook) -> None:
        """Ask each engine once; one unknown or quiet counts as 0."""
        if not self.terms.engines:
            self._looked(look)
        for number, engine in enumerate(self.terms.engines):
            try:
                fleet = mover.asks.fleet(engine)
                page = fleet.page_tokens * fleet.cp
                first, hashes = prefix.hashes(page)
                if not hashes or self._quiet.get(engine, 0.0) > time.monotonic():
                    self._answered(look, number, 0)
                    continue
                told = partial(self._said, look, number, page, prefix.limit_tokens)
                mover.asks.begin(_name(self.engine, request, engine), engine, first, hashes, self.terms.ask_s, told)
            except PeerUnknown:
                self._answered(look, number, 0)

    def _said(self, look: PeerLook, number: int, page_tokens: int, limit_tokens: int, pages: int | None) -> None:
        if pages is None:
            self._quiet[self.terms.engines[number]] = time.monotonic() + self.terms.quiet_s
        self._answered(look, number, min((pages or 0) * page_tokens, limit_tokens))

    def _answered(self, look: PeerLook, number: int, tokens: int) -> None:
        look.tokens[number] = tokens
        look.waits -= 1
        if not look.waits:
            self._looked(look)

    def _looked(self, look: PeerLook) -> None:
        if look.told:
            return
        look.told = True

        def over() -> None:
            self._looks -= 1
            look.ended(look.tokens)

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
