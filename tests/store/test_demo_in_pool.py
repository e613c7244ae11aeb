"""The demo's storage scenario over a pool of memory: one fleet writes there, another shape reads it."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from pool_demo import demo_at
from pool_processes import PoolProcesses


@pytest.mark.proof
def test_what_tp4_put_into_a_pool_tp2_reads(pool: PoolProcesses) -> None:
    command = demo_at(pool.location, "--requests", "3", "--json")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    (scenario,) = json.loads(ran.stdout)["scenarios"]
    assert [request["hits"]["storage"] > 0 for request in scenario["requests"]] == [False, True, True]
