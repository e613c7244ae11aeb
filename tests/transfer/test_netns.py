"""A network between two namespaces over TCP that is cut mid-transfer and healed, or slow: both ends say so, and go on.

`KVMOVER_FAULTS=1` runs all variants.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)
if shutil.which("ip") is None:
    pytest.skip("there is no ip command", allow_module_level=True)

from kvmover.layout import Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.protocol.wire import Verb
from perf.network_cable import Cable, NotAllowed, SlowCable
from tests.transfer.fault_crowd import Crowd, some
from tests.transfer.fault_rank import CONFIG, Job, Seat

pytestmark = pytest.mark.timeout(120)

#: UCX gives up a connection that acknowledges nothing for so long. Our own silence is longer, so either may notice.
USER_TIMEOUT = "2s"
PATIENT = replace(CONFIG, arena_bytes=4 << 20, silence_s=3.0, deadline_s=8.0)


@contextmanager
def laid(cable: Cable) -> Iterator[Cable]:
    try:
        cable.lay()
    except NotAllowed as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield cable
    cable.remove()


@pytest.fixture
def cable() -> Iterator[Cable]:
    with laid(Cable()) as cable:
        yield cable


@pytest.fixture
def crowd(cable: Cable) -> Iterator[Crowd]:
    with crowded(cable) as crowd:
        yield crowd


@contextmanager
def crowded(cable: Cable) -> Iterator[Crowd]:
    environment = {"UCX_TLS": "tcp", "UCX_TCP_USER_TIMEOUT": USER_TIMEOUT}
    here = Crowd(
        [
            Seat("prefill", Fleet(page_tokens=16), config=PATIENT, network=cable.near, environment=environment),
            Seat(
                "decode", Fleet(page_tokens=24), order="HND", config=PATIENT, network=cable.far, environment=environment
            ),
        ]
    )
    here.meet("decode", "prefill")
    yield here
    here.kill()


def test_a_cut_network_ends_requests_on_both_sides_and_a_healed_one_carries_the_next(
    crowd: Crowd, cable: Cable
) -> None:
    for number, (verb, route) in enumerate(some((Verb.PULL, Route.DIRECT), (Verb.PUSH, Route.PACKED))):
        crowd.landed(Job(f"before-{number}", number, 300, verb, route), "prefill", "decode")
        cut = Job(f"cut-{number}", 10 + number, 300, verb, route)
        poster = crowd["prefill" if verb is Verb.PUSH else "decode"]
        poster.ask("trap", "write" if verb is Verb.PUSH else "read", 5, 0, poster.pid, signal.SIGSTOP)
        crowd.move(cut, "prefill", "decode")
        poster.await_stop()  # it is about to post, with more on the way
        cable.cut()
        poster.wake()
        for engine in ("prefill", "decode"):
            (ending,) = crowd.ended(cut, engine, PATIENT.deadline_s + PATIENT.drain_s)
            assert ending.cause in ("peer_lost", "peer_aborted", "transport"), ending
            assert ending.reason
        time.sleep(1.0)  # redialling fails meanwhile
        cable.heal()
        crowd.until(lambda: all(crowd[name].ask("peers") == 1 for name in ("prefill", "decode")), 30, "no reunion")
        crowd.landed(Job(f"after-{number}", 20 + number, 300, verb, route), "prefill", "decode")
        crowd.assert_nothing_is_left()


def test_a_cable_that_delays_and_loses_packets_carries_every_byte() -> None:
    cable = SlowCable(delay_s=0.005, loss=0.01, bytes_per_s=125e6)
    with laid(cable), crowded(cable) as crowd:
        began = time.monotonic()
        for number, (verb, route) in enumerate(some((Verb.PULL, Route.DIRECT), (Verb.PUSH, Route.PACKED))):
            crowd.landed(Job(f"request-{number}", number, 300, verb, route), "prefill", "decode")
        assert time.monotonic() - began > 4 * cable.delay_s
        crowd.assert_nothing_is_left()
