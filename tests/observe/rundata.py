"""A run to report: transfers of two engines, some of which fail, and accounts of requests, as the library writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

from kvmover.cache.ledger import Credit, Ledger, Loss
from kvmover.observe.runlog import RunLog
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Stage
from kvmover.transfer.result import Cause, Ending, Result

#: 2026-11-21 00:00:00 UTC.
BEGAN_S = 1795219200.0

#: Names as they come from outside: markup, quotes, and what no font has.
UGLY = "<script>document.title='pwned'</script>&amp;\"'\x07é"

#: Of a transfer's time, what its chunks spent in each part of their way.
SHARES: Mapping[str, Mapping[Stage, float]] = {
    "send": {Stage.GATHER: 0.25, Stage.WIRE: 0.5},
    "receive": {Stage.CREDIT_WAIT: 0.125, Stage.SCATTER: 0.0625},
}


class Clock:
    """Goes where it is told."""

    def __init__(self) -> None:
        self.now = BEGAN_S

    def __call__(self) -> float:
        return self.now


def write(path: Path, requests: int = 120, rank: int = 0, seed: int = 0) -> None:
    """`requests` in a minute: each is sent, received and accounted for. Every tenth transfer is aborted."""
    random, clock = Random(seed), Clock()
    with RunLog(path, "decode", rank, clock) as log:
        ledger = Ledger(sink=log.account)
        for number in range(requests):
            name = UGLY if number == 7 else f"request-{number}"
            seconds, run_bytes = random.uniform(0.01, 2.0), random.choice([256, 512, 65536, 131072])
            nbytes = run_bytes * random.randint(1000, 4000)
            route = Route.DIRECT if run_bytes > 4096 else Route.PACKED
            result = Result(None, seconds, nbytes, nbytes // run_bytes, 8, (route,), 1)
            if number % 10 == 7:
                result = Result(f"engine gave up {name}", seconds, nbytes, 10, 0, (route,), 1, cause=Cause.ABORTED)
            for verb in ("send", "receive"):
                own = replace(result, spent_s={part: seconds * share for part, share in SHARES[verb].items()})
                log.transfer(Ending("prefill" if verb == "send" else "decode", rank, verb, name, own))
            serve(ledger, number, random, clock)
            clock.now += 60 / requests


def serve(ledger: Ledger, number: int, random: Random, clock: Callable[[], float]) -> None:
    prompt = random.randint(100, 4000)
    reusable = random.randint(0, prompt - 1)
    device, host, storage = reusable // 2, reusable // 5, reusable // 10
    missing = reusable - device - host - storage
    lost = {Loss.LATE: missing // 3, Loss.CAPACITY_EVICTED: missing - missing // 3}
    ledger.matched(number, prompt, reusable, clock())
    ledger.admitted(number, Credit(device, host, storage), lost)
    ledger.computed(number, prompt - device - host - storage)
    ledger.finished(number, clock())
