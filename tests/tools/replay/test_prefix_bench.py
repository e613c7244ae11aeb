"""The benchmark's own contenders do what the replay does: a fast tree that misses would be no result."""

from __future__ import annotations

import pytest

from kvmover.tools.replay import ReplayConfig, replay
from perf.bench_prefix import _serve
from perf.prefix_ours import UNLIMITED, Kvmover, KvmoverEvents, KvmoverInt64, Maker
from tests.tools.replay.made import generated

REQUESTS = [request for request in generated(4) if request.input_length % 512]


@pytest.mark.parametrize("maker", [Kvmover, KvmoverInt64, KvmoverEvents])
@pytest.mark.parametrize("capacity", [UNLIMITED, 3 * max(request.input_length for request in REQUESTS)])
def test_a_timed_pass_hits_what_a_replay_hits(maker: Maker, capacity: int) -> None:
    timed = _serve(maker, REQUESTS, 1, capacity, split=True)
    report = replay(REQUESTS, ReplayConfig(1, capacity))
    # The benchmark matches whole prompts, and a replay leaves the last token to be computed.
    assert timed.hit_rate >= report.totals.hit_rate > 0
    assert timed.hit_rate == pytest.approx(report.totals.hit_rate, abs=0.01)
    told = {"events"} if maker is KvmoverEvents else set[str]()
    assert timed.operations_s.keys() == {"match", "lock", "evict", "insert", "unlock", "ledger"} | told
