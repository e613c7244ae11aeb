"""Break the lines that guard memory and accounts, one at a time, and see a test fail for each.

`make mutants`: the mutants of tests/mutants/named_mutants.py, and some drawn of all others.
`python -m perf.mutants --whole [PART ...]` tries all of tests/mutants/guarded_lines.py, and keeps mutants.csv.
Ends with 1 if a named mutant survives, or a test fails for one that is said to change nothing. Two processes.
"""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from perf.command_line import options
from perf.record import replace
from tests.mutants.code_exchange import Mutant
from tests.mutants.equivalent_mutants import EQUIVALENT
from tests.mutants.guarded_lines import GUARDED
from tests.mutants.mutation_operators import mutants_of
from tests.mutants.named_mutants import NAMED

WORKERS = 2

#: Mutants of a part that are drawn where not all are tried.
DRAWN = 12

#: Each child runs one test at a time, and many are forked.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Tried:
    """The mutants of a part: how many there are and were tried, those that lived, and the words of what went wrong.

    `by_time`: how many of those that died did so at the limit of their process.
    """

    part: str
    mutants: int
    tried: int
    named: int
    equivalent: int
    by_time: int
    survived: tuple[str, ...]
    wrong: tuple[str, ...]
    seconds: float

    def row(self) -> dict[str, object]:
        """Returns the row of mutants.csv."""
        return {
            "part": self.part,
            "functions": sum(map(len, GUARDED[self.part].functions.values())),
            "mutants": self.mutants,
            "tried": self.tried,
            "killed": self.tried - self.equivalent - len(self.survived),
            "by_time": self.by_time,
            "equivalent": self.equivalent,
            "survived": len(self.survived),
            "named": self.named,
            "test_s": f"{self.seconds:.0f}",
        }


def mutants_in(part: str) -> list[Mutant]:
    """Returns all mutants of a part's guarded functions."""
    functions = GUARDED[part].functions.items()
    return [each for module, names in functions for name in names for each in mutants_of(module, name)]


def try_named(part: str) -> Tried:
    """Try the named mutants of a part, each by its own test."""
    from tests.mutants.forked_runs import Trial, run

    began, named = time.perf_counter(), NAMED[part]
    trials = [Trial(each.mutant, f"tests/{each.test}") for each in named]
    with TemporaryDirectory(prefix="kvmover-mutants-") as folder:
        runs = run(trials, sorted({each.tests for each in trials}), Path(folder))
    pairs = list(zip(named, runs.outcomes, strict=True))
    survived = tuple(f"{each.name}: {outcome.mutant}" for each, outcome in pairs if not outcome.killer)
    wrong = (*(f"without a mutant: {test}" for test in runs.failed), *survived)
    return Tried(part, len(named), len(named), len(named), 0, 0, survived, wrong, time.perf_counter() - began)


def try_some(part: str, drawn: int | None) -> Tried:
    """Try so many mutants of a part, or all if `drawn` is None, by the tests that run their lines."""
    from tests.mutants.forked_runs import NEVER_ENDS, Trial, run

    began, every = time.perf_counter(), mutants_in(part)
    chosen = every if drawn is None else random.sample(every, min(drawn, len(every)))
    with TemporaryDirectory(prefix="kvmover-mutants-") as folder:
        runs = run([Trial(each) for each in chosen], GUARDED[part].tests, Path(folder))
    said = EQUIVALENT.get(part, {})
    alive = {each.mutant for each in runs.outcomes if not each.killer}
    same = {each for each in chosen if (each.module, each.change) in said}
    wrong = (
        *(f"without a mutant: {test}" for test in runs.failed),
        *(f"said to change nothing, and killed: {each}" for each in sorted(map(str, same - alive))),
    )
    survived = tuple(str(each) for each in chosen if each in alive - same)
    by_time = sum(each.killer == NEVER_ENDS for each in runs.outcomes)
    seconds = time.perf_counter() - began
    return Tried(part, len(every), len(chosen), 0, len(same & alive), by_time, survived, wrong, seconds)


def main() -> None:
    """Try, and print a line for each part and each survivor."""
    parser = options(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*GUARDED, []], metavar="PART")
    parser.add_argument("--whole", action="store_true", help="try all mutants, and keep mutants.csv")
    asked = parser.parse_args()
    parts = asked.parts or [*GUARDED]
    os.environ.update(ONE_THREAD)
    wrong = list[str]()
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), max_tasks_per_child=1) as pool:
        named = {found.part: found for found in pool.map(try_named, parts)}
        tried = [pool.submit(try_some, part, None if asked.whole else DRAWN) for part in parts]
        for each in as_completed(tried):
            found = each.result()
            mine = named[found.part]
            wrong += [*mine.wrong, *found.wrong]
            row = found.row() | {"named": mine.named}
            print(f"{found.part}: {mine.named - len(mine.survived)} of {mine.named} named mutants die;", end=" ")
            print(f"{row['killed']} of {found.tried} others, {found.equivalent} change nothing, {found.seconds:.0f} s")
            for line in found.survived:
                print(f"  lives: {line}")
            sys.stdout.flush()
            if asked.whole:
                replace("mutants", [row], ["part"])
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
