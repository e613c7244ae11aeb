"""In Triton's interpreter every kernel does what its definition says: one process has the cases of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ahead import Ahead

from tests.proofs import family

#: For all cases of a night, a second or less each.
LIMIT_S = 1200

HERE = Path(__file__).parent
CASES = [
    *(HERE / f"{kernel}_cases.py" for kernel in ("rows", "digest", "convert")),
    HERE.parent / "transfer" / "chunk_table_cases.py",
]


def run_cases(selection: str) -> subprocess.CompletedProcess[str]:
    """TRITON_INTERPRET has to be set before Triton is imported, and the tests of compiled code need it unset."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", selection, *CASES]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


AHEAD = {"selection": run_cases}
SELECTIONS = family(["not proof", "proof and not night", "night"], few=["not proof"], proved=["proof and not night"])


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_all_cases_hold_in_the_interpreter(selection: str, request: pytest.FixtureRequest, ahead: Ahead) -> None:
    done = ahead.result(request.module, "selection", selection)
    out = done.stdout
    assert done.returncode == 0, f"\n{out}\n{done.stderr}"
    assert " passed" in out
    assert all("no sparse file" in line for line in out.splitlines() if line.startswith("SKIPPED"))
