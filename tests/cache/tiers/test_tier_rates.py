"""Rates: a kind of work that has had its share waits, and nobody else does."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Rank

from kvmover.cache.tiers import ControllerConfig, Rate, Speed, TierError, TierPolicy, Wait
from kvmover.cache.tiers.tier_policy import Bucket
from kvmover.cache.tiers.tier_storage import StorageWorker, Urgency

PROMPT = list(range(33))
#: A byte every three hours: whatever has been moved is not repaid within a test.
NEVER = Rate(1e-4, 1)


@given(
    st.floats(1, 1e9),
    st.integers(1, 1 << 30),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1 << 28)), max_size=30),
)
def test_no_more_is_moved_than_the_rate_and_the_burst_allow(bytes_per_s, burst_bytes, work):
    """Who waits as long as he is told to has moved, before each batch, what time and burst had given."""
    now, moved, bucket = 0.0, 0, Bucket.full(Rate(bytes_per_s, burst_bytes), 0.0)
    for pause_s, nbytes in work:
        now += pause_s
        now += bucket.wait_s(now) * (1 + 1e-9)
        assert moved <= (burst_bytes + now * bytes_per_s) * (1 + 1e-6) + 1
        bucket = bucket.spent(nbytes, now)
        moved += nbytes


def test_a_clock_that_goes_backwards_gives_and_takes_nothing():
    bucket = Bucket.full(Rate(10.0, 100), 5.0).spent(150, 5.0)
    assert bucket.filled(3.0).level_bytes == -50
    assert bucket.filled(3.0).filled(8.0).level_bytes == 0


def test_a_rate_bounds_the_speed_that_a_read_is_expected_to_have():
    disk = Speed(0.002, 2e9)
    assert disk.within(Rate(0.5e9)) == Speed(0.002, 0.5e9)
    assert disk.within(Rate(8e9)) == disk.within(None) == disk


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_rates_that_allow_nothing_are_refused(rate, burst):
    with pytest.raises(TierError, match="bytes a second and bursts of"):
        Rate(rate, burst)


@dataclass
class Steps:
    """A job of `left` batches of 100 bytes."""

    left: int
    nbytes: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def moves(self) -> bool:
        return not self.stopped.is_set()

    def step(self) -> bool:
        if self.stopped.is_set():
            return True
        self.left -= 1
        self.nbytes += 100
        return not self.left


def test_a_class_that_has_used_up_its_rate_lets_the_others_pass():
    worker, over = StorageWorker({Urgency.WRITE: NEVER}), list[str]()
    write, read = Steps(5), Steps(5)
    worker.begin(write, Urgency.WRITE, lambda error: over.append("write"))
    worker.begin(read, Urgency.READ, lambda error: over.append("read"))
    while not over:
        worker.wait(1.0)
        worker.poll()
    assert over == ["read"]
    assert write.left >= 4, "a second batch was written before the first was repaid"
    worker.close()
    assert write.left >= 4


def test_a_job_that_waits_for_its_rate_hears_that_it_is_to_stop():
    worker, over = StorageWorker({Urgency.READ: NEVER}), list[str]()
    first, second = Steps(1), Steps(2)
    worker.begin(first, Urgency.READ, lambda error: over.append("first"))
    worker.begin(second, Urgency.READ, lambda error: over.append("second"))
    while over != ["first"]:
        worker.wait(1.0)
        worker.poll()
    second.stopped.set()
    while over != ["first", "second"]:
        worker.wait(1.0)
        worker.poll()
    assert second.left == 2
    worker.close()


def test_a_controller_keeps_storage_to_its_rates(tmp_path):
    rank = Rank(tmp_path, setup=ControllerConfig(TierPolicy(prefetch=Wait(), least_tokens=1, write_rate=NEVER)))
    rank.serve(PROMPT)
    rank.serve([7] * 33)
    while not rank.controller.meter.counts["stored_pages"]:
        rank.controller.poll()
        rank.controller.worker.wait(0.01)
    assert rank.controller.meter.counts["stored_pages"] == 8, "one batch, and then it is paid for"
    rank.close()
