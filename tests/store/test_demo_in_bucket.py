"""The demo's storage scenario over an object store: one fleet writes there, another shape reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.store.command import stat_stores


@pytest.mark.proof
def test_what_tp4_put_into_a_bucket_tp2_reads(bucket: str):
    command = "-m", "kvmover", "demo", "--scenario", "storage", "--requests", "3", "--store", bucket, "--json"
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=True)
    (scenario,) = json.loads(ran.stdout)["scenarios"]
    assert [request["hits"]["storage"] > 0 for request in scenario["requests"]] == [False, True, True]
    assert [row.stat.pages for row in stat_stores(bucket, None)] == [0]
