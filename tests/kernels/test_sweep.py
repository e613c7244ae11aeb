"""The autotune sweep: every candidate that a GPU would run compiles as it should, on a machine without one."""

from __future__ import annotations

import pytest

from kvmover.kernels.launch import RowConfig
from perf.autotune import BUDGETS, candidates
from perf.compile_sweep import compile_one


@pytest.mark.parametrize("sms", BUDGETS, ids=lambda sms: f"sms-{sms}")
def test_a_sweep_tries_the_rule_and_nothing_that_leaves_lanes_idle(sms: int | None) -> None:
    tried = list(candidates(sms))
    assert len(set(tried)) == len(tried) >= 10
    assert (RowConfig() if sms is None else RowConfig(32768, 8)) in tried
    assert all(config.block_bytes >= config.warps * 512 for config in tried)


@pytest.mark.filterwarnings("ignore")  # Triton's own
def test_the_dry_run_says_what_is_wrong_with_a_candidate() -> None:
    line, good = compile_one((256, 64, RowConfig(4096, 4), 90))
    assert good
    assert line == "sm_90  256 B x 64   4 KiB  4 warps:  32 registers, [128] bit, 0 spills, 0 B shared"
    line, good = compile_one((256, 64, RowConfig(262144, 32), 90))
    assert not good
    assert " 0 spills" not in line
