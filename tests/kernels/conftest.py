"""Fixtures of the kernels' tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from row_moves import SPARSE_BYTES

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[str], str]]:
    """What pytest says of a file of cases in Triton's interpreter, all of them passed.

    TRITON_INTERPRET has to be set before Triton is imported, and the tests of compiled code need it unset: so the cases
    run in processes of their own, side by side.
    """
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(_interpret, name) for name in ("digest_cases", "rows_cases")}
        yield lambda name: running[name].result()


def _interpret(cases: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", HERE / f"{cases}.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = HERE.parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """A pool of more bytes than 32 bits count, in a file without blocks: only what is written costs anything."""
    path: Path = tmp_path_factory.mktemp("sparse") / "pool"
    try:
        with path.open("wb") as file:
            file.truncate(SPARSE_BYTES)
        memory = np.memmap(path, np.uint8, "r+")
    except OSError as error:
        pytest.skip(f"no sparse file of {SPARSE_BYTES >> 30} GiB here: {error}")
    path.unlink()  # gone with the mapping
    return torch.from_numpy(memory)
