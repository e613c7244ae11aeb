"""The row mover moves the same bytes as the reference, in Triton's interpreter.

TRITON_INTERPRET has to be set before Triton is imported, and the tests of compiled code need it unset: so the cases run
in a pytest of their own, whose words are shown when one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.timeout(300)
def test_all_cases_hold_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", HERE / "rows_cases.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout or "no sparse file" in done.stdout, done.stdout
