"""Fleets that share a store and are killed at any system call: whoever comes next is served right bytes, or fewer hits.

KVMOVER_KILLS=300 runs as many.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import kill_rank
import pytest
from rig import Rank

HERE = Path(__file__).parent
PAIRS = int(os.environ.get("KVMOVER_KILLS", "20")) // 2
KILLED = str(int(signal.SIGKILL))


@pytest.mark.proof
def test_two_fleets_that_are_killed_leave_a_third_right_bytes_or_fewer_hits(tmp_path):
    path = os.pathsep.join(map(str, [HERE.parents[2], HERE, HERE.parents[1] / "store"]))
    storage_tokens = 0
    with subprocess.Popen(
        [sys.executable, kill_rank.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        for seed in range(PAIRS):
            print(seed, tmp_path, file=forks.stdin, flush=True)
            assert forks.stdout.readline().split() == [KILLED, KILLED], seed
            third = Rank(tmp_path, setup=kill_rank.SETUP, keeps=kill_rank.KEEPS)
            for prompt in kill_rank.TEXTS:
                restore = third.serve(prompt)
                storage_tokens += restore.credit.storage_tokens
                third.controller.wait()
                third.forget()
                third.poison_free()
            assert not third.store.counters.poisoned, (seed, third.store.counters.poisoned)
            third.conserved()
            third.close()
        forks.stdin.close()
    assert storage_tokens > 0, "what the dead had stored was of use"
