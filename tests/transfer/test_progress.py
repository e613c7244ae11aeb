"""A mover with a thread of its own: any thread may call, it sleeps when nothing happens, and nobody waits for ever."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from concurrent.futures import Future
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mover_fleets import CONFIG, POISON, SMALL_CHUNKS, Pair, Truth, truth_of
from progress_cases import Threads

from kvmover.errors import DeadlineExceeded, KvmoverError, LayoutError, PeerUnknown, PlanError, TransportError
from kvmover.plan.cost import Route
from kvmover.transfer.config import MoverConfig, Pace
from kvmover.transfer.meter import Count, Gauge
from kvmover.transfer.result import Cause, Gate, Transfer
from kvmover.transfer.threads.progress import Progress
from kvmover.transfer.threads.wrappers import SharedMover

#: Naps that only a call ends: where one does not, the test does not end either.
ASLEEP = Pace(share=1e9, idle_s=3600.0)
FAST_ASLEEP = Pace(share=1e9, open_s=3600.0, idle_s=3600.0)
WITHIN_S = 30.0


class Event:
    """What a gate asks."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def reason(transfer: Transfer) -> str | None:
    assert transfer.result is not None
    return transfer.result.reason


def move(pair: Pair, source: SharedMover, target: SharedMover, request: str = "request") -> list[Transfer]:
    sent = source.send(request, pair.src_tables[0])
    return [sent, target.receive(request, "prefill", range(pair.tokens), pair.dst_tables[0])]


def finish(transfers: list[Transfer], source: SharedMover, target: SharedMover) -> None:
    source.wait(transfers[:1], WITHIN_S)
    target.wait(transfers[1:], WITHIN_S)


def nothing_is_left(threads: Threads) -> None:
    """Ask when the threads are gone: it looks into the movers."""
    threads.close()
    threads.pair.bench.assert_nothing_is_left()


# Calls and ends


def test_every_byte_lands_and_only_the_threads_poll():
    with Threads.of() as threads:
        source, target = threads.start()
        transfers = move(threads.pair, source, target)
        finish(transfers, source, target)
        assert [reason(transfer) for transfer in transfers] == [None, None]
        threads.pair.assert_landed()
        pollers = [mover._transport.pollers - {threading.main_thread()} for mover in threads.pair.bench.movers]
        assert pollers == [{progress._thread} for progress in threads.progress]
        nothing_is_left(threads)


def test_a_call_ends_a_nap_of_an_hour():
    with Threads.of() as threads:
        source, target = threads.start(ASLEEP)
        assert target.connect(source.card).startswith("prefill")
        target.configure(replace(CONFIG, chunk_layers=1))
        source.refuse("another", "not here")
        transfers = move(threads.pair, source, target)
        finish(transfers, source, target)
        assert target.snapshot().meter.ended == {("receive", "landed"): 1}
        threads.pair.assert_landed()


def test_a_poll_asked_for_ends_a_nap_and_does_not_wait():
    with Threads.of() as threads:
        source, target = threads.start(FAST_ASLEEP)
        transfers = move(threads.pair, source, target)
        deadline = time.monotonic() + WITHIN_S
        while not all(transfer.ended for transfer in transfers):
            assert time.monotonic() < deadline
            source.poll()
            target.poll()
            time.sleep(1e-4)
        threads.pair.assert_landed()


def test_what_is_wrong_with_a_call_is_raised_where_it_was_made():
    with Threads.of() as threads:
        source, target = threads.start()
        pages = threads.pair.dst_tables[0]
        with pytest.raises(LayoutError, match="arenas of 1048576 bytes cannot become 99999"):
            target.configure(replace(CONFIG, arena_bytes=99999))
        with pytest.raises(PeerUnknown, match="no rank of nobody is connected"):
            target.receive("request", "nobody", range(100), pages)
        with pytest.raises(PlanError, match="2 page tables for 1 components"):
            source.send("request", [*pages, *pages])
        source.send("request", threads.pair.src_tables[0])
        with pytest.raises(PlanError, match="request is already being sent"):
            source.send("request", threads.pair.src_tables[0])
        assert [m.snapshot().gauges[Gauge.OPEN_SENDS] for m in (source, target)] == [1, 0]
        assert target.snapshot().gauges[Gauge.OPEN_RECEIVES] == 0


def test_what_is_wrong_with_a_call_that_does_not_wait_fails_its_transfer_on_both_sides():
    with Threads.of() as threads:
        source, target = threads.start()
        transfers = move(threads.pair, source, target)
        gated = source.send("gated", threads.pair.src_tables[0], gates=[])
        source.attach(gated, b"first")
        source.attach(gated, b"second")
        source.wait([gated], WITHIN_S)
        assert reason(gated) == "request gated has a payload of 5 bytes already"
        finish(transfers, source, target)
        whole = target.receive("whole", "prefill", range(100), threads.pair.dst_tables[0])
        sent = source.send("whole", threads.pair.src_tables[0], gates=None)
        source.produced(sent, Gate(Event()))
        finish([sent, whole], source, target)
        assert {reason(sent), reason(whole)} <= {None, "request whole was sent as if all of it were in its pages"}


def test_gates_and_payloads_reach_the_mover_in_order():
    with Threads.of(replace(CONFIG, chunk_layers=1)) as threads:
        source, target = threads.start()
        landed = target.receive("request", "prefill", range(100), threads.pair.dst_tables[0], aux_from=[0])
        event = Event()
        sent = source.send("request", threads.pair.src_tables[0], gates=[])
        source.produced(sent, Gate(event, layers=1))
        source.produced(sent, Gate(event))
        source.attach(sent, b"first token")
        event.passed = True
        source.poll()
        finish([sent, landed], source, target)
        assert landed.landed().aux == {0: b"first token"}
        threads.pair.assert_landed()


def test_pages_that_are_named_from_another_thread_reach_the_mover_in_order_and_bad_ones_fail_the_transfer():
    with Threads.of() as threads:
        source, target = threads.start()
        (table,) = threads.pair.src_tables[0]
        landed = target.receive("request", "prefill", range(100), threads.pair.dst_tables[0])
        sent = source.send("request", [[]], gates=[])
        for first in range(0, len(table), 10):
            source.produced(sent, Gate(None, tokens=(first + 10) * 4), [table[first : first + 10]])
        finish([sent, landed], source, target)
        landed.landed()
        threads.pair.assert_landed()
        bad = source.send("bad", [[]], gates=[])
        source.produced(bad, Gate(None), [[64]])
        source.wait([bad], 10)
        assert bad.result is not None
        assert str(bad.result.reason).startswith("page id 64 is outside a pool of 64 pages")


def test_pages_that_a_destination_names_from_another_thread_reach_the_mover_and_bad_ones_fail_the_transfer():
    with Threads.of(replace(CONFIG, route=Route.DIRECT)) as threads:
        source, target = threads.start()
        (table,) = threads.pair.dst_tables[0]
        landed = target.receive("request", "prefill", range(100), None)
        sent = source.send("request", threads.pair.src_tables[0])
        for first in range(0, len(table), 10):
            target.allocated(landed, [table[first : first + 10]])
        finish([sent, landed], source, target)
        landed.landed()
        threads.pair.assert_landed()
        bad = target.receive("bad", "prefill", range(100), None)
        target.allocated(bad, [[64]])
        target.wait([bad], WITHIN_S)
        assert str(reason(bad)).startswith("page id 64 is outside a pool of 64 pages")


def test_a_callback_runs_once_in_the_thread_and_may_begin_the_next_request():
    with Threads.of(tokens=8) as threads:
        source, target = threads.start()
        done, where = threading.Event(), []

        def again(future: Future) -> None:
            where.append(threading.current_thread())
            with pytest.raises(KvmoverError, match="would wait for itself"):
                target.wait([], 1.0)
            if len(where) == 5:
                done.set()
                return
            assert future.result().landed
            following = target.receive(f"{len(where)}", "prefill", range(8), threads.pair.dst_tables[0])
            target.ended(following).add_done_callback(again)

        first = target.receive("0", "prefill", range(8), threads.pair.dst_tables[0])
        target.ended(first).add_done_callback(again)  # before it can land: else this thread would call
        sent = [source.send(f"{n}", threads.pair.src_tables[0]) for n in range(5)]
        assert done.wait(WITHIN_S)
        source.wait(sent, WITHIN_S)
        assert where == [threads.progress[1]._thread] * 5
        late = []
        target.ended(first).add_done_callback(lambda _: late.append(threading.current_thread()))
        assert late == [threading.main_thread()]
        nothing_is_left(threads)


def test_a_callback_that_raises_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture):
    with Threads.of() as threads:
        source, target = threads.start(ASLEEP)
        transfers = move(threads.pair, source, target)
        target.ended(transfers[1]).add_done_callback(lambda _: 1 // 0)
        finish(transfers, source, target)
        again = move(threads.pair, source, target, "again")
        finish(again, source, target)
        assert not reason(again[1])
        assert "ZeroDivisionError" in caplog.text


def test_an_end_that_somebody_waits_for_cannot_be_called_off():
    with Threads.of() as threads:
        source, _ = threads.start()
        sent = source.send("request", threads.pair.src_tables[0])
        assert not source.ended(sent).cancel()
        source.abort(sent, "enough of this")
        source.wait([sent], WITHIN_S)
        assert not source.ended(sent).cancel()


def test_a_wait_that_takes_too_long_names_what_is_late():
    with Threads.of() as threads:
        source, target = threads.start()
        sent = [source.send(name, threads.pair.src_tables[0]) for name in ("b", "a")]
        with pytest.raises(DeadlineExceeded, match=r"not ended within 0\.01 s: a, b"):
            source.wait(sent, 0.01)
        with pytest.raises(PlanError, match="b is not a transfer of the mover of decode rank 0"):
            target.wait(sent)
        for transfer in sent:
            source.abort(transfer, "enough of this")
        source.wait(sent, WITHIN_S)


# The end


def test_closing_fails_what_is_open_and_frees_everybody_who_waits():
    with Threads.of() as threads:
        source, target = threads.start(ASLEEP)
        sent = source.send("request", threads.pair.src_tables[0], gates=[])
        landed = target.receive("request", "prefill", range(100), threads.pair.dst_tables[0])
        waiting = threading.Thread(target=target.wait, args=([landed],))
        waiting.start()
        target.close()
        waiting.join(WITHIN_S)
        assert not waiting.is_alive()
        assert (reason(landed), landed.quarantined) == ("this side closed", False)
        source.wait([sent], WITHIN_S)
        assert "closed" in str(reason(sent)), "as it was told, or as it found when it answered"
        with pytest.raises(TransportError, match="the mover of decode rank 0 is closed: this side closed"):
            target.receive("again", "prefill", range(100), threads.pair.dst_tables[0])
        target.abort(landed, "too late")
        target.poll()
        target.close()
        assert target.ended(landed).result() is landed.result
        assert target.snapshot().meter.ended == {("receive", "aborted"): 1}
        nothing_is_left(threads)


def test_metrics_are_answered_while_the_thread_is_busy_by_what_was_seen_last():
    with Threads.of() as threads:
        _, target = threads.start()
        progress, busy, may_go = threads.progress[1], threading.Event(), threading.Event()
        before = target.snapshot()
        progress.submit(lambda _: (busy.set(), may_go.wait(WITHIN_S)))
        assert busy.wait(WITHIN_S)
        threads.pair.dst.movers[0].meter.add(Count.POLL_FAULTS)
        assert target.snapshot() is before
        may_go.set()
        assert target.snapshot().meter.counts[Count.POLL_FAULTS] == before.meter.counts[Count.POLL_FAULTS] + 1


def test_a_call_that_was_made_before_closing_is_made():
    """The thread is in another call then, and comes to both afterwards."""
    with Threads.of() as threads:
        threads.start()
        target, busy, may_go = threads.progress[1], threading.Event(), threading.Event()
        target.submit(lambda _: (busy.set(), may_go.wait(WITHIN_S)))
        assert busy.wait(WITHIN_S)
        asked = target.submit(lambda _: "made")
        closing = threading.Thread(target=target.close)
        closing.start()
        time.sleep(0.1)  # until it has said so
        may_go.set()
        closing.join(WITHIN_S)
        assert asked.result(WITHIN_S) == "made"


def test_a_callback_may_close_the_mover():
    with Threads.of() as threads:
        source, target = threads.start(ASLEEP)
        transfers = move(threads.pair, source, target)
        target.ended(transfers[1]).add_done_callback(lambda _: target.close())
        finish(transfers, source, target)
        threads.progress[1]._thread.join(WITHIN_S)
        assert not threads.progress[1]._thread.is_alive()
        threads.pair.assert_landed()


@pytest.mark.parametrize("seed", range(12))
def test_a_call_that_meets_the_end_is_answered_or_refused(seed: int):
    """The queue is looked at for the last time after the door was shut."""
    with Threads.of(tokens=4) as threads:
        source, _ = threads.start(FAST_ASLEEP)
        heard: list[str] = []

        def call() -> None:
            try:
                while True:
                    source._progress.submit(lambda mover: mover.card).result(WITHIN_S)
            except TransportError as error:
                heard.append(str(error))

        callers = [threading.Thread(target=call) for _ in range(6)]
        for caller in callers:
            caller.start()
        time.sleep(Random(seed).uniform(0, 2e-3))
        source.close()
        for caller in callers:
            caller.join(WITHIN_S)
        assert heard == ["the mover of prefill rank 0 is closed: this side closed"] * 6


def test_a_call_that_came_before_the_end_and_was_not_answered_is_refused():
    with Threads.of(tokens=4) as threads:
        source, _ = threads.start(FAST_ASLEEP)
        inside, door = threading.Event(), threading.Event()

        def stay(_: object) -> bool:
            inside.set()
            return door.wait(WITHIN_S)

        stayed = source._progress.submit(stay)
        assert inside.wait(WITHIN_S)
        closing = threading.Thread(target=source.close)
        closing.start()
        while not source._progress._calls.qsize():
            time.sleep(1e-4)
        late = source._progress.submit(lambda mover: mover.card)
        door.set()
        closing.join(WITHIN_S)
        assert stayed.result(WITHIN_S)
        with pytest.raises(TransportError, match="is closed"):
            late.result(WITHIN_S)


def test_a_forked_child_is_told_to_spawn_instead_of_waiting_for_ever():
    with Threads.of() as threads:
        source, _ = threads.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: this process has threads
            child = os.fork()
        if child == 0:
            status = 1
            signal.alarm(10)
            try:
                source.snapshot()
            except TransportError as error:
                status = 0 if "start workers by spawn, not fork" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert source.snapshot().gauges[Gauge.PEERS] == 1


# Polls that fail


class Trouble(Exception):
    """What no mover expects."""


def break_polls(progress: Progress, times: float) -> None:
    """Let the next polls of the transport fail."""
    transport, whole = progress._mover._transport, progress._mover._transport.poll
    left = [times]

    def poll():
        left[0] -= 1
        if left[0] < 0:
            transport.poll = whole
            return whole()
        raise Trouble("it broke")

    transport.poll = poll


QUICK = replace(CONFIG, drain_s=0.1)


def test_a_poll_that_fails_fails_what_is_open_and_the_next_request_lands(caplog: pytest.LogCaptureFixture):
    with Threads.of() as threads:
        source, target = threads.start()
        sent = source.send("request", threads.pair.src_tables[0], gates=[])
        landed = target.receive("request", "prefill", range(100), threads.pair.dst_tables[0])
        break_polls(threads.progress[1], times=3)
        finish([sent, landed], source, target)
        said = "the mover of decode rank 0 failed: Trouble: it broke"
        assert (reason(landed), reason(sent)) == (said, said)
        assert target.snapshot().meter.counts[Count.POLL_FAULTS] == 3
        transfers = move(threads.pair, source, target, "again")
        finish(transfers, source, target)
        assert [reason(transfer) for transfer in transfers] == [None, None]
        threads.pair.assert_landed()
        assert threads.progress[1]._fault is None
        assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
        nothing_is_left(threads)


def test_a_mover_whose_every_poll_fails_is_closed_with_the_reason():
    with Threads.of(QUICK) as threads:
        source, target = threads.start()
        landed = target.receive("request", "prefill", range(100), threads.pair.dst_tables[0])
        break_polls(threads.progress[1], times=float("inf"))
        target.wait([landed], WITHIN_S)
        assert reason(landed) == "the mover of decode rank 0 failed: Trouble: it broke"
        assert not landed.quarantined
        threads.progress[1]._thread.join(WITHIN_S)
        with pytest.raises(TransportError, match="is closed: .* it broke"):
            target.connect(source.card)


@pytest.mark.parametrize("held", [False, True])
def test_a_transfer_that_a_broken_mover_forgot_ends_with_the_mover(held: bool, monkeypatch: pytest.MonkeyPatch):
    with Threads.of(QUICK) as threads:
        _, target = threads.start()
        mover = threads.progress[1]._mover
        landed = target.receive("request", "prefill", range(100), threads.pair.dst_tables[0])

        def trouble(*_: object) -> None:
            raise Trouble("this too")

        def forgetful() -> None:
            attempts = mover._destination._attempts
            for attempt in attempts:
                attempts.remove(attempt)
            monkeypatch.setattr(mover, "abort", trouble)
            if held:
                monkeypatch.setattr(mover, "close", trouble)
            break_polls(threads.progress[1], times=1)

        target._progress.submit(lambda _: forgetful()).result()
        target.wait([landed], WITHIN_S)
        assert landed.result is not None
        assert (landed.result.cause, landed.quarantined, landed.result.quarantined) == (Cause.FAULT, held, held)
        assert "it broke" in str(reason(landed))


# Sleep


def test_a_mover_with_nothing_to_do_hardly_polls():
    """In 0.4 s a poller that spins would poll ten thousand times, one that naps 50 us two thousand."""
    with Threads.of(replace(CONFIG, ping_s=100.0, silence_s=500.0, resend_s=20.0)) as threads:
        source, _ = threads.start()
        time.sleep(0.4)
        assert polls(source) < 70  # 30 until the naps are 20 ms long, 20 of those
        source.send("request", threads.pair.src_tables[0])
        before = polls(source)
        time.sleep(0.4)
        assert polls(source) - before < 450  # an open transfer: naps of 1 ms


def polls(mover: SharedMover) -> int:
    return mover.snapshot().meter.counts[Count.POLLS]


paces = st.builds(
    lambda share, naps: Pace(share, *sorted(naps)),
    st.floats(0.01, 10),
    st.lists(st.floats(1e-6, 10), min_size=3, max_size=3),
)


@given(paces, st.lists(st.floats(0, 1e4), min_size=2, max_size=2), st.integers(0, 3))
def test_naps_keep_their_bounds_and_never_shrink_while_nothing_happens(pace: Pace, quiet: list[float], open_: int):
    sooner, later = (pace.nap_s(seconds, open_) for seconds in sorted(quiet))
    longest = pace.open_s if open_ else pace.idle_s
    assert pace.shortest_s <= sooner <= later <= longest
    assert pace.nap_s(1e9, open_) == longest
    if pace.shortest_s < sooner < longest:
        assert sooner == pace.share * min(quiet)


def test_what_comes_after_two_milliseconds_is_seen_half_a_millisecond_late_at_most():
    assert Pace().nap_s(2e-3, 1) == 0.5e-3


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"shortest_s": -1.0}, {"open_s": 1e-6}, {"idle_s": 1e-4}])
def test_a_pace_that_makes_no_sense_is_refused(wrong: dict[str, float]):
    with pytest.raises(LayoutError, match="progress has"):
        Pace(**{"open_s": 1e-3, **wrong})


# All at once

CALLERS, REQUESTS, TOKENS = 4, 12, 24


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_do_everything_at_once_get_their_bytes_or_a_reason(seed: int):
    """Each thread has its own pages; some give up at some moment; metrics are read all the time."""
    config = MoverConfig(arena_bytes=5 * 4096, costs=SMALL_CHUNKS, deadline_s=WITHIN_S, chunk_layers=seed % 2)
    with Threads.of(config, tokens=TOKENS, pages=2 * CALLERS * TOKENS // 4) as threads:
        source, target = threads.start()
        callers = [Caller(threads, source, target, seed, number) for number in range(CALLERS)]
        stop = threading.Event()
        reader = threading.Thread(target=read_all_the_time, args=(source, target, stop))
        for thread in (reader, *callers):
            thread.start()
        for caller in callers:
            caller.join(90)
            assert not caller.is_alive(), "a caller waits for ever"
        stop.set()
        reader.join(WITHIN_S)
        assert [caller.trouble for caller in callers] == [None] * CALLERS
        counted = target.snapshot().meter.ended
        assert sum(counted.values()) == CALLERS * REQUESTS
        assert counted["receive", "landed"] == sum(caller.landed for caller in callers) > 0
        strangers = rows_of(threads.pair, torch.arange(CALLERS * TOKENS // 4, 2 * CALLERS * TOKENS // 4))
        assert (strangers == POISON).all()
        nothing_is_left(threads)


def read_all_the_time(source: SharedMover, target: SharedMover, stop: threading.Event) -> None:
    while not stop.is_set():
        for mover in (source, target):
            at = mover.snapshot()
            assert at.meter.beats >= sum(sum(histogram.counts) for histogram in at.meter.stages.values())


class Caller(threading.Thread):
    """Sends and receives requests one after the other, in ways that its seed chooses, on pages that are its own."""

    def __init__(self, threads: Threads, source: SharedMover, target: SharedMover, seed: int, number: int) -> None:
        super().__init__(name=f"caller {number}")
        self.pair, self.source, self.target = threads.pair, source, target
        self.random, self.number = Random(f"{seed} {number}"), number
        self.pages = np.arange(number * TOKENS // 4, (number + 1) * TOKENS // 4)
        self.landed = 0
        self.trouble: BaseException | None = None

    def run(self) -> None:
        try:
            for turn in range(REQUESTS):
                self.one(f"{self.number}.{turn}", turn)
        except BaseException as error:
            self.trouble = error

    def one(self, name: str, turn: int) -> None:
        random, tables = self.random, [[self.pages]]
        truth = truth_of(self.pair.bench.components, TOKENS, 100 * self.number + turn)
        self.pair.src.fill(tables, truth)
        begun: list[Transfer] = []
        event, ends = Event(), []
        gates = random.choice([None, []])

        def send() -> None:
            begun.append(self.source.send(name, tables[0], gates))
            if gates is not None:
                self.source.produced(begun[-1], Gate(event))

        def receive() -> None:
            begun.append(self.target.receive(name, "prefill", range(TOKENS), tables[0]))
            self.target.ended(begun[-1]).add_done_callback(ends.append)

        calls = random.sample([(self.source, send), (self.target, receive)], 2)
        for _, call in calls:
            call()
            time.sleep(random.choice([0, 1e-4]))
        event.passed = True
        given_up = random.random() < 0.3
        if given_up:
            time.sleep(random.choice([0, 2e-4, 1e-3]))
            side = random.randrange(2)
            calls[side][0].abort(begun[side], "enough of this")
        for (mover, _), transfer in zip(calls, begun, strict=True):
            mover.wait([transfer], WITHIN_S)
        received = begun[[call for _, call in calls].index(receive)]
        assert given_up or not reason(received), reason(received)
        assert not any(transfer.quarantined for transfer in begun)
        assert [end.result() for end in ends] == [received.result]
        if not reason(received):
            self.landed += 1
            self.check(truth)

    def check(self, truth: Truth) -> None:
        """The rows on the destination's pages are those of the request."""
        pages = torch.from_numpy(self.pages)
        assert torch.equal(rows_of(self.pair, pages).reshape(truth[0].shape), truth[0])


def rows_of(pair: Pair, pages: torch.Tensor) -> torch.Tensor:
    """Bytes [layer, kv, head, page, token, byte] of pages of the destination."""
    (pool,) = pair.dst.pools[0]
    planes = [pool.plane(layer, kv)[pages].permute(2, 0, 1, 3) for layer in range(2) for kv in range(2)]
    return torch.stack(planes).contiguous().view(torch.uint8).reshape(2, 2, 2, len(pages), 4, -1)
