"""The row mover moves the same bytes as the reference, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.timeout(300)
def test_all_cases_hold_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    out = interpreted("rows_cases")
    assert "skipped" not in out or "no sparse file" in out, out
