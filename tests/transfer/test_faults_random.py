"""Requests under random faults of real processes: each lands with its bytes or fails with a reason, and all is freed.

`KVMOVER_STORM=500 pytest tests/transfer/test_faults_random.py` moves 500 requests, which takes some minutes;
`--log-cli-level=INFO` says how they ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from tests.transfer.fault_crowd import Crowd
from tests.transfer.fault_storm import DECODE, PREFILL, Storm, seats

log = logging.getLogger(__name__)

#: Requests, of which each has two ranks at either end.
REQUESTS = int(os.environ.get("KVMOVER_STORM", "15"))
SEED = int(os.environ.get("KVMOVER_STORM_SEED", "1"))

pytestmark = pytest.mark.timeout(90 + 3 * REQUESTS)


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    here = Crowd(seats())
    here.meet(DECODE, PREFILL)
    yield here
    here.kill()


@pytest.mark.proof
def test_every_request_ends_and_nothing_is_left_or_leaked(crowd: Crowd) -> None:
    Storm(SEED, crowd).blow(5, 1 << 30)  # caches are warm, the connections are up
    crowd.assert_nothing_is_left()
    before = {place: (rank.pid, rank.ask("footprint")) for place, rank in crowd.ranks.items()}
    storm = Storm(SEED + 1, crowd)
    storm.blow(REQUESTS, 4)
    crowd.assert_nothing_is_left(30)
    log.info("%d requests on 4 ranks: %s, faults %s", REQUESTS, dict(storm.outcomes), dict(storm.faults))
    assert storm.outcomes["receive landed"] >= REQUESTS / 4, storm.outcomes
    assert sum(storm.faults.values()) >= REQUESTS / 10, storm.faults
    for place, (pid, was) in before.items():
        rank = crowd.ranks[place]
        if rank.pid == pid:
            now, lost = rank.ask("footprint"), rank.ask("lost_peers")
            grown = {what: now[what] - was[what] for what in was}
            log.info("%s grew by %s while it lost %d peers", place, grown, lost)
            # UCX keeps a socket for each reconnect to a living process until one of the two ends.
            assert grown["file descriptors"] <= 4 + lost, (place, grown)
            assert grown["threads"] <= 0, (place, grown)
            assert grown["resident KiB"] <= 32 << 10, (place, grown)
