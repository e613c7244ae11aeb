"""The demo's rolling scenario: engines join, leave and are killed, and every request is answered rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)


@pytest.mark.proof
@pytest.mark.night
@pytest.mark.timeout(300)
def test_no_request_is_lost_that_the_engines_left_can_serve():
    tries: list[int] = []
    for seed in "0", "1", "2":
        command = "-m", "kvmover", "demo", "--scenario", "rolling", "--requests", "6", "--seed", seed, "--json"
        ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False)
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert report["tokens_identical"]
        assert report["bytes_identical"]
        (scenario,) = report["scenarios"]
        assert len(scenario["requests"]) == 6
        tries += [request["tries"] for request in scenario["requests"]]
    assert set(tries) == {1, 2}  # a kill may come a moment after the answer, but not six times
