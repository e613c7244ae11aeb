"""Lines that guard memory and accounts are broken one at a time, and a test fails for each that has a name."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from perf.mutants import try_named
from tests.mutants import toy_account
from tests.mutants.code_exchange import exchanged, function_at, mutant, source_of
from tests.mutants.equivalent_mutants import EQUIVALENT
from tests.mutants.forked_runs import DIES, NEVER_ENDS, Trial, run
from tests.mutants.guarded_lines import GUARDED
from tests.mutants.mutation_operators import mutants_of
from tests.mutants.named_mutants import NAMED
from tests.proofs import family

ROOT = Path(__file__).parents[2]
TOY = toy_account.__name__
FUNCTIONS = [(module, name) for each in GUARDED.values() for module, names in each.functions.items() for name in names]


@pytest.mark.parametrize("part", GUARDED)
def test_each_guarded_function_and_each_file_of_its_tests_is_there(part: str) -> None:
    guarded = GUARDED[part]
    for module, names in guarded.functions.items():
        for name in names:
            assert function_at(module, name).__code__.co_name == name.split(".")[-1]
            assert name in source_of(module).functions
    assert all((ROOT / path.split("::")[0]).is_file() for path in guarded.tests)


def test_no_function_is_guarded_twice_and_each_part_has_mutants_with_names() -> None:
    assert len(set(FUNCTIONS)) == len(FUNCTIONS)
    assert NAMED.keys() == GUARDED.keys()
    for each in (each for named in NAMED.values() for each in named):
        assert each.mutant.code() != function_at(each.module, each.function).__code__


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", family(NAMED, few=["ledger"]))
def test_each_named_mutant_is_killed_by_its_test(part: str) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        assert process.submit(try_named, part).result().wrong == ()


def test_what_is_said_to_change_nothing_is_a_mutant_of_its_part() -> None:
    for part, said in EQUIVALENT.items():
        functions = {(module, change.split(":")[0]) for module, change in said}
        assert functions <= {(module, name) for module, names in GUARDED[part].functions.items() for name in names}
        assert said.keys() <= {(each.module, each.change) for at in functions for each in mutants_of(*at)}
        assert all(len(why) < 360 for why in said.values()), "three lines"


def test_a_function_has_a_mutant_for_each_of_its_steps() -> None:
    changes = [each.change for name in ("taken", "counted") for each in mutants_of(TOY, name)]
    assert changes == [
        "taken: count > left -> False",
        "taken: count > left -> True",
        "taken: count > left -> (count >= left)",
        'taken: raise ValueError(f"{count} of {left}") -> pass',
        "taken: left - count -> (left + count)",
        "counted: number = 0 -> number = 1",
        "counted: number < most -> False",
        "counted: number < most -> (number <= most)",
        "counted: number += 1 -> pass",
        "counted: number += 1 -> number += 2",
    ]


def test_a_mutant_takes_the_place_of_its_function_wherever_that_was_imported_and_leaves_it() -> None:
    taken = toy_account.taken
    with exchanged(mutant(TOY, "taken", "left - count", "left")):
        assert (taken(3, 2), toy_account.taken(3, 2)) == (3, 3)
    assert taken(3, 2) == 1
    with pytest.raises(AssertionError, match="'left' stands 5 times in taken"):
        mutant(TOY, "taken", "left", "right")


def outcomes_of_the_toy(folder: str) -> list[tuple[str, str]]:
    trials = [Trial(each) for name in ("taken", "counted", "left_alone") for each in mutants_of(TOY, name)]
    runs = run(trials, ["tests/mutants/toy_checks.py"], Path(folder), patience_s=1.0)
    assert runs.failed == []
    return [(str(each.mutant).split(": ")[1], each.killer.split("::")[-1]) for each in runs.outcomes]


@pytest.mark.timeout(120)
def test_mutants_die_by_a_test_or_their_process_or_by_time_and_those_that_nobody_misses_live(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        found = dict(process.submit(outcomes_of_the_toy, str(tmp_path)).result())
    assert found["count > left -> False"] == "test_more_than_there_is_is_refused"
    assert found["count > left -> (count >= left)"] == "", "no test takes all there is"
    assert found["number += 1 -> pass"] == NEVER_ENDS
    assert found["is_asked -> True"] == DIES


@pytest.mark.proof
def test_drawn_mutants_are_tried_from_the_command_line_and_no_result_is_kept() -> None:
    command = [sys.executable, "-m", "perf.mutants", "ledger"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ledger: 2 of 2 named mutants die; " in done.stdout
