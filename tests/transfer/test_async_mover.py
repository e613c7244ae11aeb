"""Transfers that tasks await: results, errors, cancellation that waits for the pages, and loops that go round."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace

import numpy as np
import pytest
from mover_fleets import CONFIG
from progress_cases import Threads
from test_progress import ASLEEP, FAST_ASLEEP, WITHIN_S, Event

from kvmover.errors import PeerUnknown, PlanError, TransportError
from kvmover.plan.cost import Route
from kvmover.transfer.config import Pace
from kvmover.transfer.meter import Gauge
from kvmover.transfer.result import Gate, Transfer
from kvmover.transfer.threads.wrappers import AsyncMover, AsyncTransfer


def movers(threads: Threads, pace: Pace | None = None) -> tuple[AsyncMover, AsyncMover]:
    threads.start(pace)
    source, target = (AsyncMover(progress) for progress in threads.progress)
    return source, target


def run(task: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(task, WITHIN_S))


def receive(threads: Threads, target: AsyncMover, request: str = "request") -> AsyncTransfer:
    return target.receive(request, "prefill", range(threads.pair.tokens), threads.pair.dst_tables[0])


async def chunks_fly(threads: Threads) -> None:
    """Until the wire, told to hold what it carries, holds some, and all tasks took their first step."""
    await asyncio.sleep(0)
    while not threads.pair.bench.network._held:
        await asyncio.sleep(1e-3)


def begun(asked: AsyncTransfer) -> Transfer:
    assert asked.transfer is not None
    return asked.transfer


def test_two_tasks_await_both_ends_of_a_request():
    async def main(threads: Threads) -> None:
        source, target = movers(threads, ASLEEP)
        assert (await target.connect(source.card)).startswith("prefill")
        await target.configure(replace(CONFIG, chunk_layers=1))
        sent, landed = await asyncio.gather(
            source.send("request", threads.pair.src_tables[0]), receive(threads, target)
        )
        assert (sent.reason, landed.reason, landed.nbytes) == (None, None, 100 * 1024)
        threads.pair.assert_landed()

    with Threads.of() as threads:
        run(main(threads))
        threads.close()
        threads.pair.bench.assert_nothing_is_left()


def test_a_request_that_is_still_computed_is_told_of_its_progress():
    async def main(threads: Threads) -> None:
        source, target = movers(threads, ASLEEP)
        (table,) = threads.pair.dst_tables[0]
        asked = target.receive("request", "prefill", range(100), None, aux_from=[0])
        asked.allocated([table[:5]])
        asked.allocated([table[5:]])
        (table,) = threads.pair.src_tables[0]
        sending = source.send("request", [table[:5]], gates=[])
        event = Event()
        sending.produced(Gate(event, tokens=20))
        sending.produced(Gate(event), [table[5:]])
        sending.attach(b"first token")
        event.passed = True
        assert (await asked).aux == {0: b"first token"}
        assert (await sending).landed
        assert await asked is await asked
        threads.pair.assert_landed()

    with Threads.of() as threads:
        run(main(threads))


def test_a_request_that_was_refused_ends_with_the_reason():
    async def main(threads: Threads) -> None:
        source, target = movers(threads)
        await source.refuse("request", "not here")
        assert (await receive(threads, target)).reason == "not here"

    with Threads.of() as threads:
        run(main(threads))


def test_what_is_wrong_with_a_request_is_raised_where_it_is_awaited():
    async def main(threads: Threads) -> None:
        source, target = movers(threads)
        nowhere = target.receive("request", "nobody", range(100), threads.pair.dst_tables[0])
        nowhere.abort("enough of this")
        with pytest.raises(PeerUnknown, match="no rank of nobody"):
            await nowhere
        assert nowhere.transfer is None
        with pytest.raises(PlanError, match="2 page tables for 1 components"):
            await source.send("request", threads.pair.src_tables[0] * 2)
        await target.close()
        with pytest.raises(TransportError, match="closed"):
            receive(threads, target)

    with Threads.of() as threads:
        run(main(threads))


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_cancelled_task_is_over_when_the_pages_are_free(cancels: int):
    """Writes are under way when it is cancelled: until they have landed the pages are nobody's."""

    async def main(threads: Threads) -> None:
        source, target = movers(threads)
        threads.pair.bench.network.hold()
        asked, sending = receive(threads, target), source.send("request", threads.pair.src_tables[0])
        task = asyncio.ensure_future(asked)
        await chunks_fly(threads)
        for _ in range(cancels):
            task.cancel("changed my mind")
            await asyncio.sleep(0.02)
        assert not task.done()
        assert not begun(asked).ended
        threads.pair.bench.network.deliver()
        with pytest.raises(asyncio.CancelledError, match="changed my mind"):
            await task
        result = begun(asked).result
        assert result is not None
        assert (result.reason, result.quarantined) == ("the task that waited was cancelled", False)
        assert (await sending).reason == result.reason
        again = await asyncio.gather(
            source.send("again", threads.pair.src_tables[0]), receive(threads, target, "again")
        )
        assert [result.reason for result in again] == [None, None]
        threads.pair.assert_landed()

    with Threads.of() as threads:
        run(main(threads))
        threads.close()
        threads.pair.bench.assert_nothing_is_left()


def test_a_cancelled_task_is_over_with_pages_held_where_a_direct_write_never_ends():
    async def main(threads: Threads) -> None:
        source, target = movers(threads)
        threads.pair.bench.network.hold()
        asked, sending = receive(threads, target), source.send("request", threads.pair.src_tables[0])
        await chunks_fly(threads)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asked, 1e-3)
        assert begun(asked).quarantined
        assert threads.progress[1].snapshot().gauges[Gauge.ATTEMPTS_IN_LIMBO] == 1
        threads.pair.bench.network.deliver()
        await sending
        while begun(asked).quarantined:
            await asyncio.sleep(1e-3)
        assert threads.progress[1].snapshot().gauges[Gauge.ATTEMPTS_IN_LIMBO] == 0

    with Threads.of(replace(CONFIG, drain_s=0.05, route=Route.DIRECT)) as threads:
        run(main(threads))
        threads.close()
        threads.pair.bench.assert_nothing_is_left()


def test_a_task_cancelled_before_its_call_was_answered_leaves_no_transfer_behind():
    async def main(threads: Threads) -> None:
        _, target = movers(threads)
        door = threading.Event()
        threads.progress[1].submit(lambda _: door.wait(WITHIN_S))
        asked = receive(threads, target)
        task = asyncio.ensure_future(asked)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        assert asked.transfer is None
        assert not task.done()
        door.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert begun(asked).result is not None

    with Threads.of() as threads:
        run(main(threads))
        threads.close()


def test_an_event_loop_goes_round_while_a_poll_takes_its_time():
    """`send`, `receive` and all that is awaited leave the loop alone while the progress thread is stuck in a copy."""

    async def main(threads: Threads) -> None:
        source, target = movers(threads, FAST_ASLEEP)
        doors = [threading.Event(), threading.Event()]
        for progress, door in zip(threads.progress, doors, strict=True):
            progress.submit(lambda _, door=door: door.wait(WITHIN_S))
        waiting = asyncio.gather(
            source.send("request", threads.pair.src_tables[0]), receive(threads, target), target.configure(CONFIG)
        )
        rounds = 0
        while rounds < 100:
            await asyncio.sleep(0)
            rounds += 1
        assert not waiting.done()
        for door in doors:
            door.set()
        while not waiting.done():
            source._progress.poll()
            target._progress.poll()
            await asyncio.sleep(1e-3)
        assert [result.reason for result in (await waiting)[:2]] == [None, None]
        loops = [mover._transport.pollers for mover in threads.pair.bench.movers]
        assert [len(pollers - {threading.main_thread()}) for pollers in loops] == [1, 1]

    with Threads.of() as threads:
        for mover in threads.pair.bench.movers:
            mover._transport.pollers.clear()  # what connected them polled here
        run(main(threads))
        assert not any(threading.main_thread() in mover._transport.pollers for mover in threads.pair.bench.movers)


def test_one_mover_serves_several_loops():
    async def main(source: AsyncMover, target: AsyncMover, name: str) -> None:
        for turn in range(5):
            request = f"{name}.{turn}"
            asked = target.receive(request, "prefill", range(100), [tables[name]])
            sent, landed = await asyncio.gather(source.send(request, threads.pair.src_tables[0]), asked)
            reasons.extend([sent.reason, landed.reason])

    reasons: list[str | None] = []
    tables = dict(zip("abc", np.split(np.arange(1, 150, 2), 3), strict=True))
    with Threads.of(pages=256) as threads:
        source, target = movers(threads)
        loops = [threading.Thread(target=run, args=(main(source, target, name),)) for name in "abc"]
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join(WITHIN_S)
        assert reasons == [None] * 30
        pair, wanted = threads.pair, threads.pair.before
        for table in tables.values():
            wanted = pair.dst.landed(wanted, [[table]], pair.truth)
        pair.dst.assert_holds(wanted)
        threads.close()
        threads.pair.bench.assert_nothing_is_left()


def test_the_mover_closes_with_its_block():
    async def main(threads: Threads) -> None:
        source, target = movers(threads)
        async with source, target:
            asked = receive(threads, target)
        assert (await asked).reason == "this side closed"

    with Threads.of() as threads:
        run(main(threads))
        assert not any(progress._thread.is_alive() for progress in threads.progress)
