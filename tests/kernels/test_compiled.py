"""The row mover's machine code, by two Tritons for four GPUs, without one: wide accesses, no spills, few registers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ahead import Ahead
from compilers import COMPILERS, LIMIT_S, Limited

REGISTERS = 96

pytestmark = pytest.mark.timeout(LIMIT_S + 30)

Report = dict[str, dict]


AHEAD = {"cases": lambda compiler: compiler.reports("compile_worker.py")}


@pytest.fixture(scope="module", params=COMPILERS, ids=str)
def cases(request: pytest.FixtureRequest, ahead: Ahead) -> Report:
    """By case, of one compiler."""
    found = ahead.result(request.module, "cases", request.param)
    assert len(found) == {"all": 43, "few": 15}[request.param.cases]
    return found


def payload(case: dict) -> dict[str, list[int]]:
    """Widths in bits of the payload's loads and stores."""
    return case["widths"]


def test_aligned_rows_move_in_128_bit_accesses(cases: Report) -> None:
    aligned = {name: payload(case) for name, case in cases.items() if name.startswith(("aligned", "budgeted"))}
    assert aligned
    for name, widths in aligned.items():
        in_flight = cases[name]["accesses"] * (2 if "-and-" in name else 1)
        for kind in ("LDG", "STG"):
            assert set(widths[kind]) == {128}, name
            # of units that do not fill their share of a tile, a compiler may leave out what no thread has
            assert len(widths[kind]) == in_flight or "units-of-24" in name or "units-of-64-together" in name, name


#: A head slice of 64 tokens of 256 B, two in a tile; latents by pages of 16, two of 18 KiB, and of 32, one of 36 KiB;
#: rows of V3.2 by 64, one of 41 KiB.
WHOLE = ("256B-{}-of-64", *(f"{units}-together" for units in ("1152B-{}-of-16", "1152B-{}-of-32", "656B-{}-of-64")))


def test_whole_units_cost_a_third_less_address_arithmetic(cases: Report) -> None:
    """Against a tile with an offset and a division for each 16 bytes. Counted with what finds the tile, which both
    have."""
    pairs = [
        [cases.get(f"budgeted-{units.format(kind)}") for kind in ("whole-units", "rows-of-units")] for units in WHOLE
    ]
    found = [(whole, by_row) for whole, by_row in pairs if whole and by_row]
    assert len(found) >= 2
    for whole, by_row in found:
        in_flight = [len(case["widths"]["LDG"]) for case in (whole, by_row)]
        assert in_flight[0] >= in_flight[1]
        arithmetic = [case["integers"] / (2 * n) for case, n in zip((whole, by_row), in_flight, strict=True)]
        assert arithmetic[0] <= 21  # of a load and a store
        assert arithmetic[0] <= arithmetic[1] * 2 / 3
        assert whole["registers"] / in_flight[0] <= by_row["registers"] / in_flight[1]


def test_all_of_a_tile_is_in_flight_before_its_first_store(cases: Report) -> None:
    """Bytes in flight are what a program that has an SM to itself is fast by."""
    budgeted = {name: case for name, case in cases.items() if name.startswith("budgeted")}
    assert budgeted
    for name, case in budgeted.items():
        assert case["in_flight"] == len(case["widths"]["LDG"]), name


@pytest.mark.parametrize("word", [8, 4, 2, 1])
def test_narrower_words_move_whole(cases: Report, word: int) -> None:
    narrow = {name: payload(case) for name, case in cases.items() if name.startswith(f"word{word}-")}
    assert narrow
    for name, widths in narrow.items():
        assert set(widths["LDG"]) == set(widths["STG"]) == {8 * word}, name


def test_nothing_spills_to_local_memory(cases: Report) -> None:
    for name, case in cases.items():
        assert (case["memory"]["spills"], case["memory"]["local"], case["memory"]["stack"]) == (0, 0, 0), name


def test_no_shared_memory_barrier_or_call(cases: Report) -> None:
    for name, case in cases.items():
        assert case["memory"]["shared"] == 0, name
        kinds = {opcode.split(".")[0] for opcode in case["opcodes"]}
        assert not kinds & {"LDS", "STS", "LDSM", "BAR", "CALL"}, name


def test_registers_leave_room_for_other_work(cases: Report) -> None:
    for name, case in cases.items():
        assert 0 < case["registers"] <= REGISTERS, name


def test_the_time_limit_ends_the_children_too(tmp_path: Path) -> None:
    """Ending Triton alone leaves a hanging ptxas behind."""
    hang = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    worker = Limited.start([sys.executable, "-c", hang], dict(os.environ), tmp_path / "out", 2.0)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.result()
    child = int(worker.output.read_text())
    until = time.monotonic() + 10
    while lives(child):
        assert time.monotonic() < until, "the child lives on"
        time.sleep(0.01)


def lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
