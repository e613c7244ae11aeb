"""The kit of page tiers at work: a small sound tier passes, and each of its mutants is caught by a named check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvmover.cache.page_tiers import FinishedJob, PageJob, PageRequest, PageTier, PageVerb
from kvmover.tools.tier_conformance import PLACES, PageTierConformance

#: Pages by name, of the engines that share a folder.
_SHARED: dict[Path, dict[bytes, bytes]] = {}


class SoundTier(PageTier):
    """Pages in a dictionary; every job is done when its end is asked for."""

    page_bytes = 64

    def __init__(self, folder: Path) -> None:
        self.shared = _SHARED.setdefault(folder, {})
        self.memory = bytearray(PLACES * self.page_bytes)
        self.jobs: list[tuple[PageVerb, PageJob]] = []
        self.ended: list[FinishedJob] = []
        self.tier = self

    def lookup(self, job: PageJob) -> None:
        self.jobs.append((PageVerb.LOOKUP, job))

    def read(self, job: PageJob) -> None:
        self.jobs.append((PageVerb.READ, job))

    def write(self, job: PageJob) -> None:
        self.jobs.append((PageVerb.WRITE, job))

    def touch(self, names: Iterable[bytes]) -> None:
        pass

    def release(self, request: PageRequest) -> None:
        pass

    def finished(self) -> list[FinishedJob]:
        self.settle()
        ended, self.ended = self.ended, []
        return ended

    def do(self, verb: PageVerb, job: PageJob) -> FinishedJob:
        for name, place in zip(job.names, job.places, strict=False):
            if verb is PageVerb.WRITE:
                self.shared.setdefault(name, self.content(place))
            elif name in self.shared:
                self.put(place, self.shared[name])
        done = tuple(name in self.shared for name in job.names)
        return FinishedJob(verb, job, done, Counter())

    def put(self, place: int, content: bytes) -> None:
        self.memory[place * self.page_bytes : (place + 1) * self.page_bytes] = content

    def fill(self, place: int, content: bytes) -> None:
        self.put(place, content)

    def content(self, place: int) -> bytes:
        return bytes(self.memory[place * self.page_bytes : (place + 1) * self.page_bytes])

    def settle(self) -> None:
        jobs, self.jobs = self.jobs, []
        self.ended += [self.do(verb, job) for verb, job in jobs]

    def close(self) -> None:
        self.settle()


class TestSoundTier(PageTierConformance):
    def open(self, folder: Path, name: str) -> SoundTier:
        return SoundTier(folder)


class EndsTwice(SoundTier):
    def finished(self) -> list[FinishedJob]:
        return [end for end in super().finished() for _ in range(2)]


class FindsAll(SoundTier):
    def do(self, verb: PageVerb, job: PageJob) -> FinishedJob:
        return FinishedJob(verb, job, (True,) * len(super().do(verb, job).done), Counter())


class AnswersOnce(SoundTier):
    """One answer a job, whatever pages it has."""

    def do(self, verb: PageVerb, job: PageJob) -> FinishedJob:
        return FinishedJob(verb, job, (all(super().do(verb, job).done),), Counter())


class ReadsBeyond(SoundTier):
    """A read that goes into the place behind, too."""

    def put(self, place: int, content: bytes) -> None:
        super().put(place, content)
        super().put((place + 1) % PLACES, content)

    def fill(self, place: int, content: bytes) -> None:
        super().put(place, content)


class MixesUp(SoundTier):
    """The first page's bytes for all."""

    def do(self, verb: PageVerb, job: PageJob) -> FinishedJob:
        end = super().do(verb, job)
        for place in job.places if verb is PageVerb.READ else ():
            self.put(place, self.shared.get(job.names[0], b"?" * self.page_bytes))
        return end


class KeepsPlaces(SoundTier):
    """Pages are shared where they lie, and are found there when the place has other bytes."""

    def do(self, verb: PageVerb, job: PageJob) -> FinishedJob:
        end = super().do(verb, job)
        if verb is PageVerb.WRITE:
            self.where = dict(zip(job.names, job.places, strict=True))
        return end

    def fill(self, place: int, content: bytes) -> None:
        super().fill(place, content)
        for name, own in getattr(self, "where", {}).items():
            if own == place:
                self.shared[name] = content


class ReadsLate(SoundTier):
    """Behind `settle`, a read is still under way."""

    def settle(self) -> None:
        self.late = [job for verb, job in self.jobs if verb is PageVerb.READ] or getattr(self, "late", [])
        super().settle()

    def content(self, place: int) -> bytes:
        for job in getattr(self, "late", ()):
            super().do(PageVerb.READ, job)
        return super().content(place)


class ForgetsOthers(SoundTier):
    """A release takes every page with it."""

    def release(self, request: PageRequest) -> None:
        self.shared.clear()


class DiesWithItsWriter(SoundTier):
    def close(self) -> None:
        self.shared.clear()


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (EndsTwice, "test_pages_are_read_into_any_places_and_no_other_place_is_touched"),
        (FindsAll, "test_a_page_that_nobody_wrote_is_a_miss"),
        (AnswersOnce, "test_a_job_without_pages_ends"),
        (ReadsBeyond, "test_pages_are_read_into_any_places_and_no_other_place_is_touched"),
        (MixesUp, "test_pages_behind_those_that_the_engine_has_are_read"),
        (KeepsPlaces, "test_a_place_that_is_used_anew_is_never_read_under_its_old_name"),
        (ReadsLate, "test_nothing_is_under_way_behind_settle"),
        (ForgetsOthers, "test_a_released_request_costs_no_other_its_pages"),
        (DiesWithItsWriter, "test_pages_that_were_read_are_there_when_their_writer_is_gone"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_mutant_is_caught_by_the_check_of_its_fault(mutant: type[SoundTier], check: str, tmp_path: Path) -> None:
    class Mutated(PageTierConformance):
        def open(self, folder: Path, name: str) -> SoundTier:
            return mutant(folder)

    with pytest.raises(AssertionError):
        getattr(Mutated(), check)(tmp_path)
