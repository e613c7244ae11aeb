"""PeerTier: one rank's host pages, lent to other engines, and theirs, read into its own by a mover over its host pools.

A thread drives the mover, so that peers are answered while this engine computes. The engine's own thread says what has
come to the host and what is about to leave it; `freed` returns when no peer can take what it reads there for right.
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

from kvmover.cache.peers.inventory import HostInventory
from kvmover.cache.peers.loans import MOST_LOANS, Loan, Loans
from kvmover.cache.prefix import RadixKey
from kvmover.errors import PeerUnknown, PlanError, TierError, TransportError
from kvmover.fields import settle_whole
from kvmover.layout import Pool
from kvmover.transfer import Ending, Model, Mover, MoverConfig, Pace, Place, Progress, Transfer
from kvmover.transfer.arguments import page_tables
from kvmover.transfer.protocol.wire import Query, Verb
from kvmover.transport import Transport

#: Whoever asks waits for a thread that has nothing else to do: it looks more often than one whose engine calls it.
#: A look at nothing takes 3 us, and a nap of 1 ms with the thread's wake-up 2 % of a core less than NIXL's own thread.
_PACE = Pace(share=0.1, open_s=0.25e-3, idle_s=1e-3)


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """Whom a rank asks, and how long it waits.

    `engines`: by name, in the same order on all ranks.
    `ask_s`: for an answer; who gives none holds nothing.
    `quiet_s`: so long it is not asked again then.
    `lend_s`: for a borrower to come and read.
    `read_s`: for a read.
    `most_loans`: out at a time; see `Loans`.
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
    """Pages of the host that may be lent, and loans that are out."""

    pages: int
    loans: int


@dataclass(frozen=True, slots=True)
class PeerPrefix:
    """What peers are asked for: of a prompt the pages from `first_tokens` on and up to `limit_tokens`."""

    key: RadixKey
    first_tokens: int
    limit_tokens: int

    def hashes(self, page_tokens: int) -> tuple[int, list[bytes]]:
        """The number of the first page, and the pages' hashes, of an engine with pages of so many tokens."""
        first = self.first_tokens // page_tokens
        pages = self.limit_tokens // page_tokens
        return first, self.key.page_hashes(page_tokens * self.key.units)[first:pages]


@dataclass(slots=True, eq=False)
class PeerLook:
    """One look. `tokens`: by number of the engine, how far a prompt could be read from it, 0 where it has nothing."""

    tokens: list[int]
    waits: int
    ended: Callable[[Sequence[int]], None]
    told: bool = False


@dataclass(slots=True, eq=False)
class PeerRead:
    """One read. `ended` hears the bytes that came, or why they did not; `stopping` is asked for as long as it runs.

    What has ended without its bytes may write to its pages until it is `over`.
    """

    stopping: Callable[[], bool]
    ended: Callable[[int | BaseException], None]
    transfer: Transfer | None = None
    error: BaseException | None = None
    stopped: bool = False

    @property
    def known(self) -> bool:
        """Whether it has ended."""
        return self.error is not None or (self.transfer is not None and self.transfer.ended)

    @property
    def over(self) -> bool:
        """Whether its pages are nobody's but the reader's."""
        return self.known and (self.transfer is None or not self.transfer.held)


class PeerTier:
    """Of one rank. `close` ends the thread and the mover; the pools are the caller's, and outlive it.

    Its methods are for the engine's thread, which hears what has ended in `poll`.
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
        """Over the `pools` of the host. Peers of other `weights` are refused; where those are "", of another `model`.

        Whatever `config` says, who borrows reads: what is lent may be recalled until it was read. Raises TierError for
        a component of which not every page of a prefix is kept.
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
        """What a rank that wants to read from this one connects with."""
        return self._progress.card

    def rejoin(self, make: Callable[[], Transport], weights: str, reason: str) -> None:
        """Offer nothing of what has come to the host so far, end loans, looks and reads for `reason`, and join anew, of
        other `weights`, under the transport that `make` gives: `card` is another, and peers are connected anew.

        What comes from now on is of these weights. Waits until peers have let go of pages, or their time is up.
        """
        with self._lock:
            self._inventory = HostInventory()
        self._progress.rejoin(make, replace_fields(self._model, weights=weights), reason)

    def connect(self, card: bytes) -> str:
        """Connect a rank that this one may read from. Raises PeerRefused where it holds another model."""
        return self._progress.submit(lambda mover: mover.connect(card)).result()

    def ranks(self, engine: str) -> frozenset[int]:
        """The ranks of an engine that are connected now."""
        return self._progress.submit(lambda mover: mover.ranks(engine)).result()

    # What this rank has

    def came(self, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        """Pages of the host are whole on all ranks, and may be lent."""
        with self._lock:
            self._inventory.add(hashes, ids)

    def freed(self, ids: Sequence[int]) -> None:
        """Pages of the host are about to be used for something else. Returns when all loans of them are over.

        A loan is over once the mover answers its borrower so: what that has read by then it throws away. Waits for the
        poll under way, where there is such a loan; else for nothing.
        """
        with self._lock:
            self._inventory.drop(ids)
            names = self._loans.recalled(ids)
        if names:
            try:
                self._progress.submit(lambda mover: self._recall(mover, names)).result()
            except TransportError:  # the mover is closed, and lends nothing
                return

    # What others have

    def look(self, request: str, prefix: PeerPrefix, ended: Callable[[Sequence[int]], None]) -> None:
        """Ask all engines for a prefix, by a name that no other request of this engine has.

        `ended` hears in `poll` how many first tokens of the prompt could be read from each, in the order of the terms.
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
        """Read `positions` of what engine number `source` has offered as `request` into pages of the host.

        `tables`: one a pool, from the prompt's first page on, copied here. The pages belong to the read until it is
        over. Raises PlanError for tables that are none.
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
        """Nothing that was offered as `request` will be read."""
        names = [_name(self.engine, request, engine) for engine in self.terms.engines]
        self._call(lambda mover: [mover.asks.decline(name) for name in names])

    # Progress

    def poll(self) -> None:
        """Tell what has ended since."""
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
        """Looks and reads that have not ended."""
        return self._looks + len(self._reads)

    def wait(self, seconds: float) -> None:
        """Sleep until something may have ended, so long at most."""
        self._news.wait(seconds)

    def counts(self) -> Lent:
        """Pages that may be lent, and loans that are out."""
        with self._lock:
            return Lent(len(self._inventory), len(self._loans))

    def check(self) -> None:
        """Raise InvariantBroken where inventory or loans do not add up. O(pages): for tests."""
        with self._lock:
            self._inventory.check()
            self._loans.check()

    def close(self) -> None:
        """End the thread and the mover: nothing is lent any more, and what was being read has failed."""
        self._progress.close()

    # In the mover's thread

    def _answer(self, place: Place, query: Query) -> int:
        """What of a prompt this rank lends."""
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
        error = begun.exception()  # known already: this is the thread
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
        """One question an engine; where there is nothing to ask, the answer is known."""
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
        """The last answer has come, or none will: said in `poll`, once."""
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
        """Have the thread do something. `failed` hears what it raised, and that the mover is closed."""

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
    """As which `engine` offers what `own` asks for."""
    return f"{own}/{request}@{engine}"


def _outcome(read: PeerRead) -> int | BaseException:
    """Bytes that are in the pages, or why they are not."""
    if read.error is not None:
        return read.error
    assert read.transfer is not None
    result = read.transfer.result
    assert result is not None
    if result.reason is not None:
        return TransportError(result.reason)
    return result.nbytes
