"""Whole fleets, a process a rank: every rank of every engine holds, byte for byte, what its place in the model says.

The default is small. `KVMOVER_FLEETS=200` moves so many requests from TP4 x PP2 to TP2 x CP2 and to PP2 x CP2: 16
processes. `--log-cli-level=INFO` says what it took.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.layout import CpOrder, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Integrity
from kvmover.transfer.protocol.wire import Verb
from tests.transfer.fault_crowd import Crowd
from tests.transfer.fault_rank import CONFIG, Job, Seat

log = logging.getLogger(__name__)

REQUESTS = int(os.environ.get("KVMOVER_FLEETS", "0"))

#: Sixteen loops on two cores are slow, and nobody is to be taken for dead.
PATIENT = replace(CONFIG, deadline_s=120.0, silence_s=60.0, resend_s=5.0, ping_s=2.0)

FLEETS = {
    "prefill": Fleet(tp=4, pp=2, page_tokens=16),
    "decode": Fleet(tp=2, cp=2, page_tokens=24),
    "decode-two": Fleet(pp=2, cp=2, page_tokens=32, cp_order=CpOrder.TOKEN),
}
SMALL = {"prefill": Fleet(tp=2, pp=2, page_tokens=16), "decode": Fleet(cp=2, page_tokens=24)}

pytestmark = pytest.mark.timeout(120 + 10 * REQUESTS)


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    fleets = FLEETS if REQUESTS else SMALL
    orders = {"prefill": "NHD", "decode": "HND", "decode-two": "NHD"}
    here = Crowd(
        Seat(engine, fleet, rank, orders[engine], config=PATIENT, use_s=0.0)
        for engine, fleet in fleets.items()
        for rank in range(fleet.size)
    )
    for engine in fleets:
        if engine != "prefill":
            here.meet(engine, "prefill")
    yield here
    here.kill()


def test_requests_land_on_every_rank_of_every_engine_with_the_bytes_of_its_place(crowd: Crowd) -> None:
    chance = random.Random(3)
    began, jobs = time.monotonic(), list[tuple[Job, str]]()
    targets = sorted({engine for engine, _ in crowd.ranks} - {"prefill"})
    for number in range(REQUESTS or 8):
        job = Job(
            f"fleet-{number}",
            number,
            chance.choice([1, 30, 100, 300]),
            chance.choice(list(Verb)),
            chance.choice([*Route, None]),
            chance.choice([Integrity.NONE, Integrity.NONE, Integrity.DIGEST]),
            chance.choice([0, 1]),
        )
        jobs.append((job, targets[number % len(targets)]))
        crowd.move(job, "prefill", jobs[-1][1])
        if number >= 3:
            await_landed(crowd, *jobs[number - 3])
    for job, target in jobs:
        await_landed(crowd, job, target)
    crowd.assert_nothing_is_left()
    log.info("%d requests on %d processes in %.1f s", len(jobs), len(crowd.ranks), time.monotonic() - began)


def await_landed(crowd: Crowd, job: Job, target: str) -> None:
    for ending in [*crowd.ended(job, target, 130), *crowd.ended(job, "prefill", 130)]:
        assert (ending.cause, ending.wrong) == (None, 0), ending
