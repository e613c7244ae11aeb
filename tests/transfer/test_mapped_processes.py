"""The mapped route between processes: who is killed under a copy leaves the other alive, and its memory mapped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from mover_peer import DEADLINE_S, MoverProcess, Side
from test_two_processes import DST_PAGES, NOTICED_S, SRC_PAGES, TOKENS, half_way

from kvmover.plan.cost import Route
from kvmover.shared_memory import MapMode
from tests.proofs import family

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def victim() -> Iterator[MoverProcess]:
    process = MoverProcess("victim", 24, "HND", Route.MAPPED, "toy", "shared")
    yield process
    process.kill()


@pytest.fixture
def here() -> Iterator[Side]:
    side = Side("here", 24, "HND", Route.MAPPED, pools="shared")
    yield side
    side.mover.close()


class Local:
    """A side of this process, asked as one of another is."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def ask(self, verb: str) -> int:
        self._side.mover.poll()
        return getattr(self._side, verb)()


def test_a_source_that_is_killed_while_it_copies_ends_the_request_and_touches_no_neighbour(
    here: Side, victim: MoverProcess
):
    name = here.connect(victim.ask("card"))
    victim.ask("slow_down", 0.05)
    victim.ask("send", "doomed", SRC_PAGES)
    here.receive("doomed", "victim", 0, TOKENS, DST_PAGES)
    half_way(Local(here))
    victim.kill()
    said, seconds = here.outcome("doomed", DEADLINE_S)
    assert said.startswith(f"TransferFailed: doomed: {name} is lost")
    assert seconds < NOTICED_S
    assert here.digest([page - 1 for page in DST_PAGES], TOKENS) == Side.poisoned_digest(TOKENS)


@pytest.mark.parametrize("end", family(["resume", "kill"], ["kill"]))
def test_pages_that_a_stopped_source_may_copy_into_wait_for_its_end_and_for_no_clock(
    here: Side, victim: MoverProcess, end: str
):
    """Its lease was looked at before it was stopped: when it goes on, it writes, however long ago the lease ended."""
    config = replace(here.mover._config, lease_s=0.3, linger_s=0.3, ping_s=0.1, silence_s=0.5, drain_s=0.2)
    here.mover.configure(config)
    here.connect(victim.ask("card"))
    victim.ask("fill", 7, SRC_PAGES, TOKENS)
    victim.ask("stop_at_a_copy")
    victim.ask("send", "doomed", SRC_PAGES)
    here.receive("doomed", "victim", 0, TOKENS, DST_PAGES)
    assert here.outcome("doomed", DEADLINE_S)[0].startswith("TransferFailed")
    over = time.monotonic() + 4 * (config.lease_s + config.linger_s)
    while time.monotonic() < over:
        here.poll()
    assert here.quarantined("doomed")
    getattr(victim, end)()
    until = time.monotonic() + DEADLINE_S
    while here.quarantined("doomed"):
        assert time.monotonic() < until, "the pages never come back"
        here.poll()
    reused = here.fill(8, DST_PAGES, TOKENS)
    if end == "resume":
        victim.ask("quarantined", "doomed")
    for _ in range(100):
        here.poll()
    assert here.digest(DST_PAGES, TOKENS) == reused


def test_a_destination_that_is_killed_leaves_its_memory_to_who_copies_into_it(here: Side, victim: MoverProcess):
    name = victim.ask("name")
    victim.ask("connect", here.card())
    while here.mover._core.peers.get(name) is None:
        here.mover.poll()
    victim.ask("slow_down", 0.05)
    here.send("doomed", SRC_PAGES)
    victim.ask("receive", "doomed", "here", 0, TOKENS, DST_PAGES)
    half_way(Local(here))
    mapped = here.mover._core.mappings.pools(here.mover._core.peers[name], MapMode.WRITE)
    assert mapped is not None
    victim.kill()
    said, seconds = here.outcome("doomed", DEADLINE_S)
    assert said.startswith(f"TransferFailed: doomed: {name} is lost")
    assert seconds < NOTICED_S
    for pool in mapped:
        pool.tensors[0].fill_(7)
        assert int(pool.tensors[0].sum(dtype=int)) == 7 * pool.tensors[0].numel()
