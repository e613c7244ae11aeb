"""Starts the tests that need transformers, in vLLM's environment, which has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "transformers").glob("check_*.py"))


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem.removeprefix("check_"))
def test_against_the_real_library(checks: Path, in_engine: Callable[[str, Path], None]) -> None:
    in_engine("vllm", checks)
