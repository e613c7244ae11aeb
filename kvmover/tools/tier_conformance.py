"""PageTierConformance checks a PageTier against its interface.

Subclass `PageTierConformance` in a test file, say how an engine opens your tier, and pytest runs the checks:

    class TestMyTier(PageTierConformance):
        def open(self, folder, name):
            return MyEngine(folder, name)

Every check compares bytes. A tier may always miss. It must never bring wrong bytes, touch a place outside its jobs, or
leave a job unfinished.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Protocol

from kvmover.cache.page_tiers import FinishedJob, PageJob, PageRequest, PageTier, PageVerb
from kvmover.cache.prefix import DEFAULT_NAMESPACE, KeyUnits, RadixKey

#: Places of each engine of the kit, and tokens of a page.
PLACES, PAGE_TOKENS = 12, 4

#: Longest job, s; a longer one counts as lost.
_LONGEST_S = 60.0


class TierEngine(Protocol):
    """An engine with PLACES places of `page_bytes` bytes each, and a tier over them."""

    @property
    def tier(self) -> PageTier:
        """The tier under test."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a place: a multiple of 16."""
        ...

    def fill(self, place: int, content: bytes) -> None:
        """Overwrite a place, after telling the tier if necessary."""
        ...

    def content(self, place: int) -> bytes:
        """Returns the bytes of a place."""
        ...

    def close(self) -> None:
        """Close the tier."""
        ...


def names_of(request: PageRequest) -> list[bytes]:
    """Returns the hashes of all pages of a request's prompt."""
    return request.key.page_hashes(PAGE_TOKENS)


def request_of(name: str, first_token: int = 0, pages: int = 6) -> PageRequest:
    """Returns a request whose prompt has `pages` pages. Prompts with other first tokens share no page."""
    tokens = list(range(first_token, first_token + pages * PAGE_TOKENS))
    return PageRequest(name, RadixKey.of(tokens, DEFAULT_NAMESPACE, KeyUnits.PLAIN))


class Driver:
    """An engine that submits jobs and takes the end of each exactly once."""

    def __init__(self, engine: TierEngine) -> None:
        self.engine, self.tier = engine, engine.tier
        self._open: dict[tuple[PageVerb, int], PageJob] = {}
        self.ended: dict[tuple[PageVerb, int], FinishedJob] = {}
        self._serial = 0
        for place in range(PLACES):
            engine.fill(place, self.poison(place))

    def poison(self, place: int) -> bytes:
        """Returns the bytes of a place before any page was in it."""
        return bytes([0xA0 + place]) * self.engine.page_bytes

    def page(self, name: bytes) -> bytes:
        """Returns the bytes of a page, seeded by its hash."""
        return Random(name).randbytes(self.engine.page_bytes // 2) * 2

    def submit(
        self, verb: PageVerb, request: PageRequest, pages: Sequence[int], places: Sequence[int] = ()
    ) -> tuple[PageVerb, int]:
        """Submit a job for pages of the request's prompt. Returns its mark for `end`."""
        names, self._serial = names_of(request), self._serial + 1
        job = PageJob(self._serial, tuple(names[page] for page in pages), tuple(places), request)
        self._open[verb, self._serial] = job
        {PageVerb.LOOKUP: self.tier.lookup, PageVerb.READ: self.tier.read, PageVerb.WRITE: self.tier.write}[verb](job)
        return verb, self._serial

    def poll(self) -> None:
        """Collect ended jobs. Asserts that each was submitted, ended once, and answers each page."""
        for ended in self.tier.finished():
            mark = ended.verb, ended.job.number
            assert mark not in self.ended, f"{ended.verb} {ended.job.number} ended twice"
            assert self._open.pop(mark, None) is ended.job, f"an end of {mark}, which was not submitted"
            assert len(ended.done) == len(ended.job.names), "a job has as many answers as pages"
            self.ended[mark] = ended

    def end(self, mark: tuple[PageVerb, int]) -> FinishedJob:
        """Wait for the end of a job and return it. AssertionError after 60 s."""
        stop = time.monotonic() + _LONGEST_S
        while mark not in self.ended:
            assert time.monotonic() < stop, f"{mark} has not ended"
            self.poll()
            time.sleep(0.001)
        return self.ended[mark]

    def write(self, request: PageRequest, pages: Sequence[int], places: Sequence[int]) -> FinishedJob:
        """Fill places with the bytes of the pages, write them, and wait for the end."""
        names = names_of(request)
        for page, place in zip(pages, places, strict=True):
            self.engine.fill(place, self.page(names[page]))
        return self.end(self.submit(PageVerb.WRITE, request, pages, places))

    def lookup(self, request: PageRequest, pages: Sequence[int]) -> list[bool]:
        """Look pages up. Returns True for each page found."""
        return list(self.end(self.submit(PageVerb.LOOKUP, request, pages)).done)

    def read(self, request: PageRequest, pages: Sequence[int], places: Sequence[int]) -> list[bool]:
        """Look pages up, read them and compare all places' bytes. Returns True for each page read."""
        self.lookup(request, pages)
        before = [self.engine.content(place) for place in range(PLACES)]
        ended = self.end(self.submit(PageVerb.READ, request, pages, places))
        self.compare(request, ended, before)
        return list(ended.done)

    def compare(self, request: PageRequest, ended: FinishedJob, before: Sequence[bytes]) -> None:
        """Compare each place with the page read into it, or else with `before`."""
        names = names_of(request)
        where = dict(zip(ended.job.places, zip(ended.job.names, ended.done, strict=True), strict=True))
        for place in range(PLACES):
            name, done = where.get(place, (b"", False))
            if done:
                assert name in names
                assert self.engine.content(place) == self.page(name), "bytes of something else under a valid name"
            elif place not in where:
                assert self.engine.content(place) == before[place], f"place {place} was touched, and no job has it"


class PageTierConformance:
    """Checks of a tier. A subclass says how an engine opens the tier. `tmp_path` is pytest's."""

    def open(self, folder: Path, name: str) -> TierEngine:
        """Open an engine that shares pages with every other engine opened in `folder`."""
        raise NotImplementedError

    @contextmanager
    def engines(self, folder: Path, count: int) -> Generator[list[Driver]]:
        """Open `count` engines, and close all of them at the end."""
        with ExitStack() as stack:
            made: list[Driver] = []
            for number in range(count):
                engine = self.open(folder, f"engine{number}")
                stack.callback(engine.close)
                made.append(Driver(engine))
            yield made

    def test_pages_are_read_into_any_places_and_no_other_place_is_touched(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            assert first.write(request_of("w"), range(6), range(6)).ok
            assert second.lookup(request_of("looks"), range(6)) == [True] * 6
            assert second.read(request_of("r"), range(6), [7, 3, 11, 0, 5, 1]) == [True] * 6

    def test_a_page_that_nobody_wrote_is_a_miss(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            assert first.write(request_of("w"), [0, 1, 3], [0, 1, 3]).ok
            assert second.lookup(request_of("looks"), range(4))[:3] == [True, True, False]
            assert second.read(request_of("r"), range(4), [9, 8, 7, 6])[:3] == [True, True, False]
            assert second.lookup(request_of("other", first_token=1000), range(4)) == [False] * 4
            assert second.read(request_of("more", first_token=1000), range(2), [2, 3]) == [False, False]

    def test_pages_behind_those_that_the_engine_has_are_read(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            first.write(request_of("w"), range(6), range(6))
            assert second.read(request_of("r"), range(2, 5), [4, 5, 6]) == [True] * 3

    def test_jobs_of_many_requests_end_once_each(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            requests = [request_of(f"r{number}", first_token=1000 * number) for number in range(4)]
            places = [range(3 * number, 3 * number + 3) for number in range(4)]
            for request, of_request in zip(requests, places, strict=True):
                assert first.write(request, range(3), of_request).ok
            again = [first.submit(PageVerb.WRITE, *job) for job in zip(requests, [range(3)] * 4, places, strict=True)]
            for mark in again:
                first.end(mark)  # a tier may drop a write that would have to wait
            marks = [second.submit(PageVerb.LOOKUP, request, range(3)) for request in requests]
            assert all(second.end(mark).done == (True,) * 3 for mark in marks)
            marks = [second.submit(PageVerb.READ, *job) for job in zip(requests, [range(3)] * 4, places, strict=True)]
            for request, mark in zip(requests, marks, strict=True):
                ended = second.end(mark)
                assert ended.ok
                for name, place in zip(ended.job.names, ended.job.places, strict=True):
                    assert second.engine.content(place) == second.page(name), request.name

    def test_a_job_without_pages_ends(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 1) as (only,):
            for verb in PageVerb:
                ended = only.end(only.submit(verb, request_of("none"), ()))
                assert (ended.ok, ended.done, ended.nbytes) == (True, (), 0)

    def test_nothing_is_under_way_behind_settle(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            first.write(request_of("w"), range(4), range(4))
            request = request_of("r")
            assert second.lookup(request, range(4)) == [True] * 4
            write = second.submit(PageVerb.WRITE, request_of("own", first_token=500), [0], [9])
            read = second.submit(PageVerb.READ, request, range(4), range(4))
            second.tier.settle()
            second.poll()
            assert {write, read} <= second.ended.keys(), "an end is missing behind settle"
            for place in range(4):
                second.engine.fill(place, second.poison(place))
            time.sleep(0.05)
            assert all(second.engine.content(place) == second.poison(place) for place in range(4)), "a late read"

    def test_a_place_that_is_used_anew_is_never_read_under_its_old_name(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            first.write(request_of("w"), range(4), range(4))
            first.engine.fill(2, first.poison(2))
            done = second.read(request_of("r"), range(4), range(4, 8))
            assert done[:2] == [True, True]

    def test_a_page_that_two_engines_write_is_done_for_both(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 3) as (first, second, third):
            for engine in (first, second, second):
                assert engine.write(request_of("w"), range(3), range(3)).ok
            assert third.read(request_of("r"), range(3), range(3)) == [True] * 3

    def test_a_released_request_costs_no_other_its_pages(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            first.write(request_of("w"), range(6), range(6))
            aborted, kept = request_of("aborted"), request_of("kept")
            under_way = second.submit(PageVerb.LOOKUP, aborted, range(6))
            second.lookup(kept, range(6))
            second.tier.release(aborted)
            second.end(under_way)
            assert second.read(kept, range(6), range(6)) == [True] * 6
            second.tier.release(kept)
            second.tier.release(kept)
            assert second.read(request_of("aborted"), range(6), range(6)) == [True] * 6

    def test_pages_that_were_read_are_there_when_their_writer_is_gone(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 3) as (first, second, third):
            first.write(request_of("w"), range(4), range(4))
            assert second.read(request_of("r"), range(4), range(4)) == [True] * 4
            first.engine.close()
            assert third.read(request_of("r"), range(4), range(4)) == [True] * 4

    def test_an_engine_that_goes_away_under_a_read_costs_a_miss(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            first.write(request_of("w"), range(4), range(4))
            request = request_of("r")
            second.lookup(request, range(4))
            before = [second.engine.content(place) for place in range(PLACES)]
            first.engine.close()
            ended = second.end(second.submit(PageVerb.READ, request, range(4), range(4)))
            second.compare(request, ended, before)

    def test_a_touch_of_any_name_is_harmless(self, tmp_path: Path) -> None:
        with self.engines(tmp_path, 2) as (first, second):
            first.write(request_of("w"), range(3), range(3))
            for engine in (first, second):
                engine.tier.touch(iter(names_of(request_of("w"))))
            assert second.read(request_of("r"), range(3), range(3)) == [True] * 3
