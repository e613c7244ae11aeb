"""RemoteTier is a PageTier over other engines' host memory. Pages that this engine writes stay in place, lent to peers.

One rank suffices if its memory has the pages of all ranks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvmover.cache.page_tiers.page_tier import FinishedJob, PageJob, PageRequest, PageTier, PageVerb
from kvmover.cache.peers import PeerAnswer, PeerMiss, PeerPrefix, PeerQuestion, PeerRead, PeerTier
from kvmover.repeats import Repeats, form_of

log = logging.getLogger(__name__)

#: The outcome of a page that peers may read here from now on: written here, or read and lent on.
LENT = "lent"

_READ, _FAILED = "read", "failed"

#: The longest request name sent to peers, in characters.
_MOST_NAME = 128


@dataclass(slots=True, eq=False)
class _Asked:
    """A look-up of pages from `first` on. `numbers`: pages of the prompt, by name.

    `pages`: leading pages that `source` offers, None until all peers have replied. `used`: the offer was read or
    declined.
    """

    question: PeerQuestion
    numbers: dict[bytes, int]
    first: int
    pages: int | None = None
    source: int = 0
    used: bool = False
    waiting: list[PageJob] = field(default_factory=list[PageJob])

    def offers(self, name: bytes) -> bool:
        """Returns True if a peer offers the page."""
        return not self.used and self.first <= self.numbers.get(name, -1) < (self.pages or 0)


@dataclass(slots=True, eq=False)
class _Reading:
    """A read in flight of consecutive pages of the prompt, named in `run`."""

    job: PageJob
    run: frozenset[bytes]
    began_s: float
    read: PeerRead | None = None
    outcome: int | BaseException | None = None
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Returns True once its places belong to the engine alone."""
        return self.outcome is not None and self.read is not None and self.read.over


class RemoteTier(PageTier):
    """A PageTier of prompt pages in other engines' host memory, of any TP and page size. Outcomes: read, failed, LENT.

    Peers are asked once a request, from the first page of its first look-up to the prompt's end; one job reads the run
    of pages that they offer. A write copies no bytes. Call `freed` before the bytes of a place change. `sourced`, if
    there is one, hears what the named source of a request brought, in pages, or why none.
    """

    def __init__(
        self,
        peers: PeerTier,
        page_tokens: int,
        closed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a tier that owns `peers`, with `page_tokens` a page. `close` calls `closed`, then closes `peers`."""
        self.peers, self._page_tokens, self._closed, self._clock = peers, page_tokens, closed, clock
        self._asked: dict[str, _Asked] = {}
        self._reads: list[_Reading] = []
        self._ended: list[FinishedJob] = []
        self._serial, self._repeats = 0, Repeats()
        self.sourced: Callable[[PageRequest, int | PeerMiss], None] | None = None

    def lookup(self, job: PageJob) -> None:
        request, asked = job.request, None
        if request is not None:
            asked = self._asked.get(request.name) or self._ask(request, job.names)
        if asked is not None and asked.pages is None and not asked.used:
            asked.waiting.append(job)
        else:
            self._found(asked, job)

    def read(self, job: PageJob) -> None:
        asked = self._asked.get(job.request.name) if job.request is not None else None
        places = dict(zip(job.names, job.places, strict=True))
        offered = {asked.numbers[name]: name for name in job.names if asked.offers(name)} if asked else {}
        if asked is None or not offered:
            self._end_read(job, frozenset(), 0, 0.0)
            return
        asked.used, first = True, min(offered)
        stop = next(page for page in range(first, first + len(offered) + 1) if page not in offered)
        run = [offered[page] for page in range(first, stop)]
        reading = _Reading(job, frozenset(run), self._clock())
        self._reads.append(reading)

        def ended(outcome: int | BaseException) -> None:
            reading.outcome, reading.seconds = outcome, self._clock() - reading.began_s
            if isinstance(outcome, BaseException):
                self._unread(f"{len(run)} pages of {asked.question.request}", outcome)

        reading.read = PeerRead(lambda: False, ended)
        positions = range(first * self._page_tokens, stop * self._page_tokens)
        table = [0] * first + [places[name] for name in run]
        self.peers.read(asked.question, asked.source, positions, [table] * self.peers.pools, reading.read)

    def write(self, job: PageJob) -> None:
        self.peers.came(job.names, job.places)
        done, outcomes = (True,) * len(job.names), Counter({LENT: len(job.names)})
        self._ended.append(FinishedJob(PageVerb.WRITE, job, done, outcomes))

    def freed(self, places: Iterable[int]) -> None:
        """Stop lending these places. On return no peer accepts bytes that it reads there as valid."""
        self.peers.freed(list(places))

    def touch(self, names: Iterable[bytes]) -> None:
        pass

    def release(self, request: PageRequest) -> None:
        asked = self._asked.pop(request.name, None)
        if asked is None or not asked.used:
            self._tell(request, PeerMiss.NEEDLESS)
        if asked is not None:
            self._decline(asked)

    def finished(self) -> list[FinishedJob]:
        self.peers.poll()
        for reading in [each for each in self._reads if each.over]:
            self._reads.remove(reading)
            came = isinstance(reading.outcome, int)
            assert reading.job.request is not None
            self._tell(reading.job.request, len(reading.run) if came else PeerMiss.READ_FAILED)
            run, nbytes = (reading.run, reading.outcome) if came else (frozenset[bytes](), 0)
            assert isinstance(nbytes, int)
            self._end_read(reading.job, run, nbytes, reading.seconds)
        taken, self._ended = self._ended, []
        return taken

    def settle(self) -> None:
        while not all(each.over for each in self._reads):
            self.peers.poll()
            self.peers.wait(0.01)

    def close(self) -> None:
        self._closed()
        self.peers.close()

    def _ask(self, request: PageRequest, names: Sequence[bytes]) -> _Asked | None:
        """Ask every peer, once a request. Returns None if no page in `names` belongs to the prompt."""
        hashes = request.key.page_hashes(self._page_tokens * request.key.units)
        numbers = {page_hash: number for number, page_hash in enumerate(hashes)}
        first = min((numbers[name] for name in names if name in numbers), default=None)
        if first is None:
            return None
        self._serial += 1
        name = f"{self._serial}-{request.name}"[:_MOST_NAME]
        asked = _Asked(self.peers.question(name, hashes[0], request.source), numbers, first)
        self._asked[request.name] = asked

        def answered(said: Sequence[PeerAnswer]) -> None:
            tokens = [each.tokens for each in said]
            most = max(tokens, default=0)
            asked.source = tokens.index(most) if tokens else 0
            asked.pages = most // self._page_tokens
            if asked.pages <= first:
                self._tell(request, next((each.miss for each in said if each.miss), PeerMiss.ABSENT))
                self._decline(asked)
            self._answer(asked)

        prefix = PeerPrefix(request.key, first * self._page_tokens, len(hashes) * self._page_tokens)
        self.peers.look(asked.question, prefix, answered)
        return asked

    def _decline(self, asked: _Asked) -> None:
        """Decline the offer, unless it was read, and end the waiting look-ups."""
        if not asked.used:
            asked.used = True
            self.peers.decline(asked.question)
        self._answer(asked)

    def _tell(self, request: PageRequest, brought: int | PeerMiss) -> None:
        if request.source is not None and self.sourced is not None:
            self.sourced(request, brought)

    def _answer(self, asked: _Asked) -> None:
        waiting, asked.waiting = asked.waiting, []
        for job in waiting:
            self._found(asked, job)

    def _found(self, asked: _Asked | None, job: PageJob) -> None:
        done = tuple(asked is not None and asked.offers(name) for name in job.names)
        self._ended.append(FinishedJob(PageVerb.LOOKUP, job, done, Counter()))

    def _end_read(self, job: PageJob, run: frozenset[bytes], nbytes: int, seconds: float) -> None:
        """End a read that brought the pages in `run`, and lend them on."""
        came = [(name, place) for name, place in zip(job.names, job.places, strict=True) if name in run]
        self.peers.came([name for name, _ in came], [place for _, place in came])
        outcomes = Counter({_READ: len(came), _FAILED: len(job.names) - len(came), LENT: len(came)})
        done = tuple(name in run for name in job.names)
        self._ended.append(FinishedJob(PageVerb.READ, job, done, +outcomes, nbytes, seconds))

    def _unread(self, pages: str, error: BaseException) -> None:
        """Log a failed read, at most once a minute for the same reason."""
        if (more := self._repeats.more(form_of(str(error)), self._clock())) is not None:
            log.warning("%s were not read: %s%s", pages, error, more)
