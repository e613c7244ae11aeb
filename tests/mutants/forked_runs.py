"""Runs tests against mutants: pytest collects them once, and each mutant has a child process that runs them.

A mutant is given the tests that run its line, until one fails: first those that killed others, then the quickest. A
line's tests are found by tracing one honest run. A child that outlives its limit is ended, and its mutant counts as
killed: it never ends.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.mutants.code_exchange import Mutant, codes_in, function_at

#: Seconds that each test of a child may take beyond five times those of the slowest one.
PATIENCE_S = 6.0

#: Seconds that a test may take without a mutant: it is traced, which is slow, and other work may have the processors.
HONEST_S = 600.0

#: Written by a child before each of its tests, and by no pickle first.
GOES_ON = b"\0"

#: Killers that are no test.
DIES, NEVER_ENDS = "the process dies", "it never ends"

Place = tuple[str, int]


@dataclass(frozen=True)
class Trial:
    """A mutant and the beginning of its tests' names; "" for all that run its line."""

    mutant: Mutant
    tests: str = ""


@dataclass(frozen=True)
class Outcome:
    """The end of a mutant: the test that failed, or "" if all passed; `tests`: how many it was given."""

    mutant: Mutant
    killer: str
    tests: int
    seconds: float


@dataclass(frozen=True)
class Honest:
    """A test's run without a mutant: its time, its failure or "", and the places that it reached."""

    seconds: float
    failure: str
    places: frozenset[Place]


@dataclass
class ForkedRuns:
    """A pytest plugin that runs the collected tests once a trial, and keeps the `outcomes`.

    `failed`: tests that fail without any mutant, and are left out.
    """

    trials: Sequence[Trial]
    folder: Path
    patience_s: float = PATIENCE_S
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    failed: list[str] = field(default_factory=list[str])
    _items: list[pytest.Item] = field(default_factory=list[pytest.Item])
    _writing: int = -1

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """No example is kept or made smaller: a failure is an answer. Equal runs try equal examples."""
        quick = settings(
            settings.get_profile("shared-machine"),
            database=None,
            phases=(Phase.explicit, Phase.generate),
            derandomize=True,
        )
        settings.register_profile("mutants", quick)
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests without a mutant, then with each."""
        self._items = session.items
        traced = {each.mutant for each in self.trials if not each.tests}
        functions = {(each.module, each.function): each.source.path for each in traced}
        wanted = {code: path for at, path in functions.items() for code in codes_in(function_at(*at).__code__)}
        runs = self._in_child(lambda: [self._honest(item, wanted) for item in session.items], HONEST_S)
        assert isinstance(runs, list), f"the tests without a mutant: {runs}"
        sound = {number: runs[number] for number in range(len(runs)) if not runs[number].failure}
        self.failed = [session.items[number].nodeid for number in range(len(runs)) if number not in sound]
        killers = Counter[str]()
        for trial in self.trials:
            chosen = sorted(
                (number for number in sound if self._is_given(trial, number, sound[number])),
                key=lambda number: (-killers[session.items[number].nodeid], runs[number].seconds),
            )
            limit_s = self.patience_s + 5 * max((runs[number].seconds for number in chosen), default=0)
            began = time.perf_counter()
            killer = self._in_child(partial(self._mutated, trial.mutant, chosen), limit_s)
            killers[str(killer)] += 1
            self.outcomes.append(Outcome(trial.mutant, str(killer), len(chosen), time.perf_counter() - began))
        return True

    def _is_given(self, trial: Trial, number: int, run: Honest) -> bool:
        """Returns True if a mutant is tried by a test."""
        if trial.tests:
            return self._items[number].nodeid.startswith(trial.tests)
        path = trial.mutant.source.path
        return any((path, line) in run.places for line in trial.mutant.lines)

    def _honest(self, item: pytest.Item, wanted: dict[CodeType, str]) -> Honest:
        places, began = set[Place](), time.perf_counter()

        def line(frame: FrameType, event: str, argument: object) -> object:
            places.add((wanted[frame.f_code], frame.f_lineno))
            return line

        def call(frame: FrameType, event: str, argument: object) -> object:
            return line(frame, event, argument) if frame.f_code in wanted else None

        if wanted:
            threading.settrace(call)  # pyright: ignore[reportArgumentType]
            sys.settrace(call)  # pyright: ignore[reportArgumentType]
        try:
            failure = self._run([item])
        finally:
            sys.settrace(None)
        return Honest(time.perf_counter() - began, failure, frozenset(places))

    def _mutated(self, each: Mutant, chosen: Iterable[int]) -> str:
        """Returns the test that fails with a mutant in place, or ""."""
        each.apply()
        return self._run([self._items[number] for number in chosen])

    def _run(self, items: Sequence[pytest.Item]) -> str:
        for number, item in enumerate(items, 1):
            os.write(self._writing, GOES_ON)
            reports = runtestprotocol(item, nextitem=items[number] if number < len(items) else None, log=False)
            if any(report.failed for report in reports):
                return item.nodeid
        return ""

    def _in_child(self, work: Callable[[], object], limit_s: float) -> object:
        """Returns the value of `work` in a process of its own, or a word on a process that gives none.

        `limit_s`: the longest that a test may take.
        """
        reading, self._writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _be_child(self._writing, work)
        os.close(self._writing)
        parts, is_ready = list[bytes](), True
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while is_ready := bool(select.select([pipe], [], [], limit_s)[0]):
                part = pipe.read(1 << 16)
                if not part:
                    break
                parts.append(part)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = b"".join(parts).lstrip(GOES_ON)
        if said:
            return pickle.loads(said)
        return DIES if is_ready else NEVER_ENDS


def _be_child(writing: int, work: Callable[[], object]) -> None:
    """Lead a group of processes, so that those that a test starts end with this one; print nothing; say the value."""
    os.setpgrp()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        said = pickle.dumps(work())
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(said)
    finally:
        os._exit(0)


def run(trials: Sequence[Trial], tests: Sequence[str], folder: Path, patience_s: float = PATIENCE_S) -> ForkedRuns:
    """Returns the outcomes of mutants under tests, by paths or names of pytest. It needs a process that ran no test.

    `folder`: of files that the tests make. `patience_s`: see PATIENCE_S.
    """
    runs = ForkedRuns(trials, folder, patience_s)
    quiet = ("-q", "-s", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    code = pytest.main([*quiet, f"--basetemp={folder / 'tests'}", *tests], plugins=[runs])
    assert len(runs.outcomes) == len(trials), f"pytest ended with {code} before all mutants were tried"
    return runs
