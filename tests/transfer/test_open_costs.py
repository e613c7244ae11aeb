"""Open requests and connected engines make no call dearer: steps are counted, with few of them and with many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer import Progress
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.core import MAX_LOSSES
from kvmover.transfer.destination.quarantine import ASK_S
from kvmover.transfer.mover import MAX_TIMERS, Mover
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Gate, Transfer
from tests.proofs import family
from tests.steps_of import steps_of
from tests.transfer.mover_fleets import CONFIG, Bench, HandClock

KV, FLEET = Component.attention(2, 2, 16, "bfloat16"), Fleet(page_tokens=16)
FEW, MANY, MOST = 8, 400, 10_000

#: A call with many requests open may take this much more than with few.
AT_MOST = 1.2


def open_receives(count: int) -> tuple[Bench, Mover, Mover]:
    """A destination that waits for `count` requests of a source, and has heard that the source noted them."""
    bench = Bench((KV,), MoverConfig(sandbox_bytes=0, arena_bytes=1 << 20), HandClock())
    target, source = (bench.engine(name, FLEET).movers[0] for name in ("decode", "prefill"))
    target.connect(source.card)
    bench.turn()
    for number in range(count):
        target.receive(f"open-{number}", "prefill", range(64), None)
    bench.turn(2 + count // 50)
    return bench, target, source


def receive(mover: Mover) -> Callable[[], object]:
    return lambda: mover.receive("one", "prefill", range(64), None)


def allocated(mover: Mover) -> Callable[[], object]:
    return partial(mover.allocated, mover.receive("one", "prefill", range(64), None), [[3]])


def abort(mover: Mover) -> Callable[[], object]:
    return partial(mover.abort, mover.receive("one", "prefill", range(64), None), "enough")


def idle(mover: Mover) -> Callable[[], object]:
    return mover.poll


@pytest.mark.parametrize("count", family([MANY, MOST], few=[MANY], proved=[MANY]))
@pytest.mark.parametrize("call", [receive, allocated, abort, idle], ids=lambda call: call.__name__)
def test_a_call_costs_the_same_beside_many_open_receives(
    call: Callable[[Mover], Callable[[], object]], count: int
) -> None:
    few, many = (steps_of(call(open_receives(each)[1])) for each in (FEW, count))
    assert many <= AT_MOST * few


@pytest.mark.parametrize("many", family([MANY, MOST], few=[MANY], proved=[MANY]))
def test_a_message_costs_the_same_beside_many_open_receives(many: int) -> None:
    taken = list[int]()
    for count in (FEW, many):
        bench, target, source = open_receives(count)
        landing = target.receive("one", "prefill", range(64), [[0, 1, 2, 3]])
        source.send("one", [[4, 5, 6, 7]])
        taken.append(steps_of(lambda bench=bench, landing=landing: bench.settle(lambda: landing.ended)))
    assert taken[1] <= AT_MOST * taken[0]


def test_a_send_costs_the_same_beside_many_open_sends() -> None:
    taken = list[int]()
    for count in (FEW, MANY):
        bench, target, source = open_receives(0)
        for number in range(count):
            source.send(f"open-{number}", [[0]], gates=[])
        sent = list[Transfer]()
        taken.append(steps_of(lambda source=source, sent=sent: sent.append(source.send("one", [[1]], gates=[]))))
        taken.append(steps_of(lambda source=source, sent=sent: source.produced(sent[0], Gate(None, tokens=16), [[]])))
        taken.append(steps_of(lambda source=source, sent=sent: source.abort(sent[0], "enough")))
        del bench, target
    for few, many in zip(taken[:3], taken[3:], strict=True):
        assert many <= AT_MOST * few


def engines_connected(count: int) -> tuple[Bench, Mover, list[Mover]]:
    """A destination that is connected to `count` engines."""
    bench = Bench((KV,), MoverConfig(sandbox_bytes=0, arena_bytes=1 << 16), HandClock())
    target = bench.engine("decode", FLEET).movers[0]
    sources = [bench.engine(f"prefill-{number}", FLEET, pages=4).movers[0] for number in range(count)]
    for source in sources:
        target.connect(source.card)
    bench.turn()
    return bench, target, sources


def test_a_receive_costs_the_same_beside_many_engines() -> None:
    taken = list[int]()
    for count in (FEW, 100):
        _, target, _ = engines_connected(count)
        taken.append(steps_of(partial(target.receive, "one", "prefill-3", range(64), [[0, 1, 2, 3]])))
    assert taken[1] <= AT_MOST * taken[0]


def test_a_lost_engine_costs_the_same_beside_many_that_are_lost() -> None:
    taken = list[int]()
    for count in (FEW, 100):
        _, target, sources = engines_connected(count)
        for source in sources[1:]:
            target._lose(source._core.transport.name, "gone")
        taken.append(steps_of(partial(target._lose, sources[0]._core.transport.name, "gone")))
    assert taken[1] <= AT_MOST * taken[0]


def test_a_lost_peers_requests_end_in_portions_and_other_messages_come_in_between() -> None:
    """No poll ends more than a portion, the last costs what the first did, and each says that more is left."""
    _, target, source = open_receives(MANY)
    transfers = [attempt.transfer for attempt in target._destination._attempts]
    steps = [steps_of(partial(target._lose, source._core.transport.name, "gone"))]
    ended, left = [sum(transfer.ended for transfer in transfers)], list[bool]()
    while ended[-1] < MANY:
        steps.append(steps_of(lambda: left.append(target.poll())))
        ended.append(sum(transfer.ended for transfer in transfers))
    assert max(after - before for before, after in zip([0, *ended], ended, strict=False)) <= MAX_LOSSES
    assert all(left)
    assert max(steps[1:]) <= AT_MOST * steps[0]


def test_memory_that_many_lost_requests_left_is_looked_at_in_portions() -> None:
    taken = list[int]()
    for count in (FEW, MANY):
        bench = Bench((KV,), replace(CONFIG, route=Route.DIRECT, deadline_s=100.0), HandClock())
        target, source = (bench.engine(name, FLEET, pages=count).movers[0] for name in ("decode", "prefill"))
        target.connect(source.card)
        bench.turn()
        for number in range(count):
            target.receive(f"open-{number}", "prefill", range(16), [[number]])
        bench.turn(2 + count // 50)
        target._lose(source._core.transport.name, "gone")
        while len(target._destination.quarantine) < count:
            target.poll()
        for _ in range(4):
            bench.clock.now += ASK_S
            taken.append(max(steps_of(target.poll) for _ in range(3)) // min(count, MAX_TIMERS))
    assert max(taken[4:]) <= AT_MOST * max(taken[:4])


def test_a_peer_that_comes_back_before_all_have_heard_of_its_loss_serves_new_requests() -> None:
    bench, target, source = open_receives(MANY)
    old = [attempt.transfer for attempt in target._destination._attempts]
    target._lose(source._core.transport.name, "gone")
    target.connect(source.card)
    landing = target.receive("one", "prefill", range(64), [[0, 1, 2, 3]])
    source.send("one", [[4, 5, 6, 7]])
    bench.settle(lambda: landing.ended and all(transfer.ended for transfer in old))
    assert landing.landed()
    assert {transfer.result.reason for transfer in old if transfer.result} == {"gone"}


def test_a_mover_that_closes_tells_all_requests_of_its_peers() -> None:
    _, target, _ = open_receives(MANY)
    transfers = [attempt.transfer for attempt in target._destination._attempts]
    target.close()
    assert all(transfer.ended for transfer in transfers)


def test_a_progress_thread_looks_at_no_open_transfer_that_goes_on() -> None:
    bench = Bench((KV,), CONFIG, HandClock())
    mover = bench.engine("decode", FLEET).movers[0]
    progress = Progress(mover)
    sent = [progress.begin(lambda m, n=n: m.send(f"open-{n}", [[0]], gates=[])).result() for n in range(MANY)]
    assert progress.submit(lambda _: steps_of(progress._announce)).result() < 20
    progress.submit(lambda m: m.abort(sent[7], "enough")).result()
    assert progress.ended(sent[7]).result(10).reason == "enough"
    progress.close()


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("route", [Route.PACKED, Route.DIRECT])
def test_a_chunk_costs_the_same_in_a_request_of_many(route: Route, verb: Verb) -> None:
    taken = list[float]()
    for chunks in (16, 128):
        config = replace(CONFIG, costs=replace(CONFIG.costs, chunk_bytes=2048), route=route, verb=verb)
        bench = Bench((KV,), config, HandClock())
        target, source = (bench.engine(name, FLEET, pages=chunks).movers[0] for name in ("decode", "prefill"))
        target.connect(source.card)
        bench.turn()
        source.send("one", [range(chunks)])
        landing = target.receive("one", "prefill", range(16 * chunks), [range(chunks)])
        steps = steps_of(lambda bench=bench, landing=landing: bench.settle(lambda: landing.ended, 100))
        taken.append(steps / landing.landed().writes)
    assert taken[1] <= AT_MOST * taken[0]
