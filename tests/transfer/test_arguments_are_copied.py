"""Whatever a call was given may be changed once it has returned: schedulers go on with the lists of one request for the
next. And the three movers take the same arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from mover_fleets import POISON, Pair
from progress_cases import Threads
from test_progress import WITHIN_S

from kvmover.errors import PlanError
from kvmover.transfer import AsyncMover, AsyncTransfer, Gate, Mover, Service, SharedMover, Transfer

#: Pages that nobody names: even ones, which tables of the tests' requests leave out.
STRANGERS = range(0, 64, 2)


def spoil(given: Any) -> None:
    """Change whatever can be changed: page ids into others of the pool, lists into longer ones, bytes into zeros."""
    if isinstance(given, bytearray):
        given[:] = bytes(len(given))
    elif isinstance(given, np.ndarray | torch.Tensor):
        given[:] = _like(given)
    elif isinstance(given, list):
        for each in given:
            spoil(each)
        if given and isinstance(given[0], int):
            given[:] = [*STRANGERS][: len(given)]
        given.append(given[0] if given else 0)


def _like(given: Any) -> Any:
    others = np.resize(np.array(STRANGERS), len(given))
    return torch.from_numpy(others) if isinstance(given, torch.Tensor) else others


@dataclass
class Spoiling:
    """A mover, or a transfer, each call of which has its arguments spoilt as soon as it has returned."""

    of: Any
    called: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.of, name)

        def spoilt(*given: Any, **named: Any) -> Any:
            returned = call(*given, **named)
            self.called.add(name)
            if not inspect.isawaitable(returned) or isinstance(returned, AsyncTransfer):
                spoil([*given, *named.values()])
                return returned
            return self._begun(returned, [*given, *named.values()])

        return spoilt

    async def _begun(self, call: Awaitable[Any], given: list[Any]) -> Any:
        """Of a coroutine, when it took its first step."""
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        spoil(given)
        return await task


def mutable(kind: type) -> set[str]:
    """The public methods that are given anything that a caller could change."""
    calls = {name: member for name, member in vars(kind).items() if inspect.isfunction(member) and name[0] != "_"}
    return {
        name
        for name, member in calls.items()
        for each in inspect.signature(member).parameters.values()
        if any(word in str(each.annotation) for word in ("Sequence[npt", "Sequence[Gate", "Sequence[int", "bytes"))
    }


class Passed:
    """An event that is over."""

    def query(self) -> bool:
        return True


class Tables:
    """A pair's page tables, in another form that can be changed at each call."""

    def __init__(self, pair: Pair) -> None:
        self.src, self.dst, self._forms = pair.src_tables[0][0], pair.dst_tables[0][0], 0

    def of(self, table: np.ndarray) -> list[Any]:
        self._forms += 1
        forms: list[Callable[[np.ndarray], Any]] = [np.array, np.ndarray.tolist, lambda ids: torch.from_numpy(ids + 0)]
        return [forms[self._forms % 3](table)]


def look(pair: Pair, aux: dict[int, bytes] | None) -> None:
    """Every page that was named has its bytes, and every other is as it was."""
    pair.assert_landed()
    (pool,) = pair.dst.pools[0]
    for layer in range(2):
        for kv in range(2):
            others = pool.plane(layer, kv)[list(STRANGERS)].contiguous().view(torch.uint8)
            assert (others == POISON).all()
    assert aux == {0: b"token"}


@pytest.mark.parametrize("kind", [Mover, SharedMover])
def test_arguments_of_a_mover_may_be_changed_once_a_call_has_returned(kind: Any):
    with Threads.of() as threads:
        pair, tables = threads.pair, Tables(threads.pair)
        door = threading.Event()
        movers: Sequence[Any] = pair.bench.movers if kind is Mover else threads.start()
        source, target = map(Spoiling, movers)
        target.connect(bytearray(movers[0].card))
        asked = target.receive("request", "prefill", range(pair.tokens), None, [0])
        sent = source.send("request", tables.of(tables.src[:5]), [Gate(Passed(), tokens=20)])
        if kind is SharedMover:  # all that waits for nothing is done when everything was changed
            for progress in threads.progress:
                progress.submit(lambda _: door.wait(WITHIN_S))
        target.allocated(asked, tables.of(tables.dst[:7]))
        target.allocated(asked, tables.of(tables.dst[7:]))
        source.produced(sent, Gate(Passed(), tokens=40), tables.of(tables.src[5:10]))
        source.produced(sent, Gate(Passed()), tables.of(tables.src[10:]))
        source.attach(sent, bytearray(b"token"))
        door.set()
        if kind is Mover:
            pair.bench.ended([asked, sent])
        else:
            movers[0].wait([sent], WITHIN_S)
            movers[1].wait([asked], WITHIN_S)
        look(pair, asked.landed().aux)
        again = source.send("again", tables.of(tables.src), None, bytearray(b"token"))
        landed = target.receive("again", "prefill", range(pair.tokens), tables.of(tables.dst), [0])
        if kind is Mover:
            pair.bench.ended([again, landed])
        else:
            movers[1].wait([landed], WITHIN_S)
        look(pair, landed.landed().aux)
        assert source.called | target.called >= mutable(kind) - {"wait"}


def test_arguments_of_an_async_mover_may_be_changed_once_a_call_has_returned():
    async def main(threads: Threads) -> None:
        pair, tables = threads.pair, Tables(threads.pair)
        threads.start()
        movers = [AsyncMover(progress) for progress in threads.progress]
        source, target = map(Spoiling, movers)
        await target.connect(bytearray(movers[0].card))
        door = threading.Event()
        for progress in threads.progress:
            progress.submit(lambda _: door.wait(WITHIN_S))
        asking = target.receive("request", "prefill", range(pair.tokens), None, [0])
        sending = source.send("request", tables.of(tables.src[:5]), [Gate(Passed(), tokens=20)])
        asked, sent = Spoiling(asking), Spoiling(sending)
        asked.allocated(tables.of(tables.dst[:7]))
        asked.allocated(tables.of(tables.dst[7:]))
        sent.produced(Gate(Passed(), tokens=40), tables.of(tables.src[5:10]))
        sent.produced(Gate(Passed()), tables.of(tables.src[10:]))
        sent.attach(bytearray(b"token"))
        door.set()
        look(pair, (await asking).aux)
        again = source.send("again", tables.of(tables.src), None, bytearray(b"token"))
        landed = target.receive("again", "prefill", range(pair.tokens), tables.of(tables.dst), [0])
        look(pair, (await landed).aux)
        assert (await again).landed
        assert source.called | target.called >= mutable(AsyncMover)
        assert asked.called | sent.called >= mutable(AsyncTransfer)

    with Threads.of() as threads:
        asyncio.run(asyncio.wait_for(main(threads), WITHIN_S))


@pytest.mark.parametrize("kind", [SharedMover, AsyncMover])
def test_what_cannot_be_read_is_refused_in_the_call_and_fails_no_transfer(kind: Any):
    odd: Any = [5.5]
    with Threads.of() as threads:
        threads.start()
        source = kind(threads.progress[0])
        for wrong in (lambda: source.send("request", [odd]), lambda: source.receive("request", "p", range(8), [odd])):
            with pytest.raises(PlanError, match=r"page table 0 names page 5\.5"):
                wrong()
        shared = SharedMover(threads.progress[0])
        growing = shared.send("request", threads.pair.src_tables[0], gates=[])
        calls: list[Callable[[], Any]] = [
            lambda: shared.produced(growing, Gate(None), [odd]),
            lambda: shared.produced(growing, odd),
            lambda: shared.allocated(growing, [odd]),
            lambda: shared.attach(growing, odd),
        ]
        for call in calls:
            with pytest.raises(PlanError):
                call()
        assert shared.snapshot() is not None
        assert not growing.ended


#: What a mover for others has in a form of its own: who drives it, what `snapshot` copies, what a question is handed to
#: others by (PeerTier alone asks, in the mover's thread), and how its thread is woken and how long it sleeps.
OWN = {"hand_to", "poll", "to_expected_end_s", "wait"}


def public(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(kind).items()
        if name[0] != "_" and inspect.isfunction(member)
    }


def taken(signature: inspect.Signature, without: Sequence[str] = ("self",)) -> list[inspect.Parameter]:
    return [each for each in signature.parameters.values() if each.name not in without]


@pytest.mark.parametrize("kind", [SharedMover, AsyncMover])
def test_what_a_mover_takes_its_sharers_take_too(kind: type):
    """Every public call of Mover, with its parameters: names, order, types and defaults."""
    theirs = public(kind)
    ended_by_nobody = {"produced", "allocated", "attach", "abort"} if kind is AsyncMover else set[str]()
    for name, signature in public(Mover).items():
        if name in OWN or (kind is not Mover and name == "close"):  # by whom: "this side"
            continue
        if name in ended_by_nobody:
            assert taken(public(AsyncTransfer)[name]) == taken(signature, ("self", "transfer")), name
        else:
            assert taken(theirs[name]) == taken(signature), name
    properties = {name for name, member in vars(Mover).items() if isinstance(member, property) and name[0] != "_"}
    assert {name for name in properties - {"meter"} if not hasattr(kind, name)} == set(), "snapshot has a meter's copy"


@pytest.mark.parametrize("service", ["repeated", Service.REPEATED])
@pytest.mark.parametrize("kind", [Mover, SharedMover])
def test_a_request_that_is_sent_repeatedly_is_served_repeatedly_by_its_word_too(kind: Any, service: Any):
    with Threads.of() as threads:
        pair = threads.pair
        movers: Sequence[Any] = pair.bench.movers if kind is Mover else threads.start()
        sent = movers[0].send("request", pair.src_tables[0], service=service)
        for _ in range(2):
            landed = movers[1].receive("request", "prefill", range(pair.tokens), pair.dst_tables[0])
            if kind is Mover:
                pair.bench.ended([landed])
            else:
                movers[1].wait([landed], WITHIN_S)
            assert landed.landed().reason is None
        assert not sent.ended
        with pytest.raises(PlanError, match="service = 'thrice'; it is one of once, repeated"):
            movers[0].send("another", pair.src_tables[0], service="thrice")


def test_sharers_of_a_mover_see_who_is_there_and_what_ends():
    async def asked(mover: AsyncMover, heard: list[Any]) -> None:
        await mover.watch(heard.append)
        assert await mover.ranks("decode") == {0}
        assert [process.rank for process in await mover.processes("decode")] == [0]
        (waits,) = await mover.waiting("request")
        assert (waits[0].engine, *waits[1:]) == ("decode", range(8), None)
        assert list(await mover.calibrations()) == []
        mover.poll()

    with Threads.of() as threads:
        source, target = threads.start()
        heard, also = list[Any](), list[Any]()
        source.watch(heard.append)
        landed = target.receive("request", "prefill", range(8), None)
        while not source.waiting("request"):
            source.poll()
        asyncio.run(asked(AsyncMover(threads.progress[0]), also))
        assert (source.ranks("decode"), source.config, str(source.device)) == ({0}, threads.pair.bench.config, "cpu")
        assert [process.rank for process in source.processes("decode")] == [0]
        assert list(source.calibrations()) == []
        source.refuse("request", "not here")
        target.wait([landed], WITHIN_S)
        sent = source.send("other", threads.pair.src_tables[0], deadline_s=1e-3)
        source.wait([sent], WITHIN_S)
        source.snapshot()
        assert [ending.request for ending in heard] == [ending.request for ending in also] == ["other"]


def test_a_copy_of_the_arguments_is_made_by_the_thread_that_calls(monkeypatch: pytest.MonkeyPatch):
    """Whoever is called by many threads reads nothing of theirs in its own."""
    read_by = set[threading.Thread]()

    class Watched(list[Any]):
        def __iter__(self) -> Any:
            read_by.add(threading.current_thread())
            return super().__iter__()

    with Threads.of() as threads:
        source, _ = threads.start()
        transfer: Transfer = source.send("request", Watched([threads.pair.src_tables[0][0]]), gates=Watched([]))
        source.produced(transfer, Gate(None), Watched([[]]))
        source.snapshot()
    assert read_by == {threading.current_thread()}
