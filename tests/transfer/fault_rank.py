"""A rank over NIXL in a process of its own that is made to fail: told what to do over a pipe, it tells what ended."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvmover.errors import KvmoverError
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Costs, Route
from kvmover.transfer.config import Integrity, MoverConfig
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Transfer
from kvmover.transport import NixlTransport
from perf.network_cable import enter
from tests.peer_processes import start_peer
from tests.transfer.fault_pages import Shelf, Tables

COMPONENTS = (Component("attention", 4, 2, 4, 64, "bfloat16"), Component("keys", 4, 1, 1, 24, "uint8"))

#: Short patience, small chunks, and room for a few of them.
CONFIG = MoverConfig(
    arena_bytes=256 << 10,
    deadline_s=4.0,
    drain_s=0.5,
    ping_s=0.2,
    resend_s=0.3,
    silence_s=1.5,
    lease_s=1.0,
    linger_s=0.5,
    costs=Costs(descriptor_us=1, wire_rate=1e3, gather_rate=1e3, scatter_rate=1e3, chunk_us=10, chunk_bytes=32 << 10),
)

#: A loop that has something to do sleeps so long, one that has nothing so long: many loops share two cores.
BUSY_S, IDLE_S = 300e-6, 5e-3


@dataclass(frozen=True, slots=True)
class Seat:
    """Who a process is, its `environment` before NIXL is loaded, and its `network`: a namespace, None for ours.

    A request's pages stay with it for `use_s` after it landed, and are compared again when they are given back.
    """

    engine: str
    fleet: Fleet
    rank: int = 0
    order: str = "NHD"
    pages: int = 128
    config: MoverConfig = CONFIG
    components: tuple[Component, ...] = COMPONENTS
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    network: str | None = None
    use_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """A request, as both sides are told of it. `seed` makes its rows up."""

    name: str
    seed: int
    tokens: int
    verb: Verb = Verb.PUSH
    route: Route | None = Route.PACKED
    integrity: Integrity = Integrity.NONE
    chunk_layers: int = 0
    chunk_bytes: int = 32 << 10


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a job on one rank. `cause` is None where it landed; `wrong` counts bytes of what did.

    `quarantined`: its pages were not given back with the result. `spoiled`: bytes that changed while they were in use.
    """

    job: str
    side: str
    engine: str
    rank: int
    cause: str | None
    reason: str | None
    seconds: float
    wrong: int = 0
    quarantined: bool = False
    spoiled: int = 0


@dataclass(slots=True)
class _Open:
    job: Job
    side: str
    transfer: Transfer
    tables: Tables
    ending: Ending | None = None
    until: float = 0.0


class Rank:
    """One rank: a mover, its pages, and the requests it has open. Every method can be asked for over the pipe."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._shelf = Shelf(seat.components, seat.fleet, seat.rank, seat.order, seat.pages)
        self.transport = NixlTransport(f"{seat.engine}-{seat.rank}")
        place = Place(seat.engine, seat.fleet, seat.rank)
        self.mover = Mover(self.transport, Model("toy", seat.components), place, self._shelf.pools, seat.config)
        self._open: list[_Open] = []
        self._traps: dict[str, tuple[int, threading.Timer]] = {}
        self._closed = False
        self.naps_s = 0.0
        for verb in ("write", "read"):
            self._watch(verb)

    def _watch(self, verb: str) -> None:
        post = getattr(self.transport, verb)

        def watched(*arguments: Any) -> int:
            if verb == "write" and not arguments[3]:  # a probe of the way to a peer: a chunk says whose it is
                return post(*arguments)
            left, timer = self._traps.pop(verb, (0, None))
            if timer is None:
                return post(*arguments)
            if left:
                self._traps[verb] = left - 1, timer
                return post(*arguments)
            timer.start()
            if not timer.interval:
                timer.join()
            ticket = post(*arguments)  # copies let other threads run
            timer.join()  # however fast the post was, there is no next one before the signal
            return ticket

        setattr(self.transport, verb, watched)

    def card(self) -> bytes:
        return self.mover.card

    def name(self) -> str:
        return self.transport.name

    def connect(self, card: bytes) -> str:
        return self.mover.connect(card)

    def forget(self, engine: str, rank: int) -> None:
        self.mover.forget(engine, rank)

    def nap(self, seconds: float) -> None:
        """Sleep so long after every poll from now on."""
        self.naps_s = seconds

    def calm(self) -> None:
        """No more naps and traps."""
        self.naps_s = 0.0
        self._traps.clear()

    def trap(self, verb: str, after: int, seconds: float, pid: int, number: int) -> None:
        """Send a signal `seconds` after this process begins to post an operation, the one after `after` others, and
        before it posts another. With 0 seconds it comes before."""
        self._traps[verb] = after, threading.Timer(seconds, os.kill, (pid, number))

    def send(self, job: Job) -> Ending | None:
        return self._begin("send", job, lambda tables: self.mover.send(job.name, tables))

    def receive(self, job: Job, engine: str) -> Ending | None:
        config = self._seat.config
        costs = replace(config.costs, chunk_bytes=job.chunk_bytes)
        config = replace(config, costs=costs, verb=job.verb, route=job.route, integrity=job.integrity)
        self.mover.configure(replace(config, chunk_layers=job.chunk_layers))
        return self._begin(
            "receive", job, lambda tables: self.mover.receive(job.name, engine, range(job.tokens), tables)
        )

    def _begin(self, side: str, job: Job, begin: Callable[[Tables], Transfer]) -> Ending | None:
        """Open a request, or how it ended at once."""
        tables = self._shelf.take(job.tokens)
        if tables is None:
            return self._ending(job, side, "refused", "no pages are free", 0.0)
        if side == "send":
            self._shelf.fill(tables, job.seed, job.tokens)
        try:
            self._open.append(_Open(job, side, begin(tables), tables))
        except KvmoverError as error:
            self._shelf.give_back(tables)
            return self._ending(job, side, "refused", f"{type(error).__name__}: {error}", 0.0)
        return None

    def refuse(self, job: Job, reason: str) -> None:
        self.mover.refuse(job.name, reason)

    def abort(self, job: Job, reason: str) -> None:
        for open_ in self._open:
            if open_.job == job:
                self.mover.abort(open_.transfer, reason)

    def _ending(self, job: Job, side: str, cause: str | None, reason: str | None, seconds: float) -> Ending:
        return Ending(job.name, side, self._seat.engine, self._seat.rank, cause, reason, seconds)

    def poll(self) -> list[Ending]:
        """Advance, and what can be told of requests now: once when they end, once more if their pages were spoiled."""
        if not self._closed:
            self.mover.poll()
        now, told = time.monotonic(), list[Ending]()
        for open_ in list(self._open):
            if open_.ending is None and open_.transfer.ended:
                told.append(self._end(open_, now))
            elif open_.ending is not None and not open_.transfer.quarantined and now >= open_.until:
                self._open.remove(open_)
                if spoiled := self._wrong(open_):
                    told.append(replace(open_.ending, spoiled=spoiled))
                self._shelf.give_back(open_.tables)
        return told

    def _end(self, open_: _Open, now: float) -> Ending:
        result = open_.transfer.result
        assert result is not None, "an ended transfer has a result"
        cause = result.cause.value if result.cause else None
        ending = self._ending(open_.job, open_.side, cause, result.reason, result.seconds)
        open_.ending = replace(ending, wrong=self._wrong(open_), quarantined=open_.transfer.quarantined)
        open_.until = now + (self._seat.use_s if result.landed and open_.side == "receive" else 0.0)
        return open_.ending

    def _wrong(self, open_: _Open) -> int:
        """What a source gave out, and what a destination says has landed, must be right."""
        result = open_.transfer.result
        assert result is not None, "an ended transfer has a result"
        if open_.side == "receive" and not result.landed:
            return 0
        return self._shelf.wrong(open_.tables, open_.job.seed, open_.job.tokens)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def progress(self) -> int:
        """Chunks of all open requests that have arrived, or left."""
        arrived = sum(len(attempt.state.arrived) for attempt in self.mover._destination._attempts)
        requests = self.mover._source._requests.values()
        return arrived + sum(len(a.state.written) for request in requests for a in request.attempts.values())

    def peers(self) -> int:
        """How many peers are connected."""
        return len(self.mover._core.peers)

    def lost_peers(self) -> int:
        return self.mover.meter.counts[Count.LOST_PEERS]

    def left(self) -> dict[str, int]:
        """What must be zero when nothing is going on: tables, regions, pages, and bytes that nobody should have."""
        mover, core = self.mover, self.mover._core
        arenas = [staging.arena for staging in (core.incoming, core.outgoing)]
        left = {
            "attempts": len(mover._destination._attempts),
            "credits": len(mover._destination._credits),
            "limbo": len(mover._destination.quarantine),
            "reads": len(mover._reads.flights),
            "requests": len(mover._source._requests),
            "early wants": len(mover._source.early),
            "queued": len(mover._writes._queue),
            "staged": len(mover._writes._staged),
            "writes": len(mover._writes.flights),
            "reserved": sum(arena.reserved_bytes for arena in arenas),
            "quarantined": sum(arena.quarantined_bytes for arena in arenas),
            "open jobs": len(self._open),
            "in quarantine": sum(open_.transfer.quarantined for open_ in self._open),
            "pages": self._shelf.taken,
            "dirty bytes": self._shelf.dirty(),
            "operations": len(self.transport._flights),
        }
        return {what: number for what, number in left.items() if number}

    def memory(self) -> str:
        """A digest of what peers can write: the pools and the arena."""
        content = hashlib.sha256(self.mover._core.incoming.tensor.numpy())
        for pool in self._shelf.pools:
            content.update(pool.tensors[0].numpy())
        return content.hexdigest()

    def footprint(self) -> dict[str, int]:
        return footprint()

    def close(self) -> None:
        """Close the mover while the process lives on."""
        self._closed = True
        self.mover.close()

    def drop_memory(self) -> None:
        """Give the pools and arenas back to the system, as an engine that is torn down does."""
        self.close()
        self._shelf.pools.clear()
        self._shelf._planes.clear()
        self._open.clear()
        del self.mover, self.transport
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def footprint() -> dict[str, int]:
    """What a process may leak: file descriptors, threads, memory maps, and KiB of memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    own = Path("/proc/self")
    return {
        "file descriptors": len(os.listdir(own / "fd")),
        "threads": len(list((own / "task").iterdir())),
        "memory maps": len((own / "maps").read_text().splitlines()),
        "resident KiB": int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10,
    }


class RankProcess:
    """`tell(verb, ...)` has a method of `Rank` called over there; `ask` also waits for what it returned."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.endings: list[Ending] = []
        self.stopped = False
        self._process, self._pipe = start_peer(_serve, seat)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "a started process has a number"
        return self._process.pid

    def tell(self, verb: str, *arguments: object) -> None:
        self._tell(verb, arguments, False)

    def ask(self, verb: str, *arguments: object, within_s: float = 20) -> Any:
        self._tell(verb, arguments, True)
        deadline = time.monotonic() + within_s
        while self._pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                kind, value = self._pipe.recv()
            except EOFError:
                raise self._dead() from None
            if kind == "answer":
                return value
            self._take(kind, value)
        raise AssertionError(f"{self.seat.engine} {self.seat.rank} does not answer to {verb}")

    def _tell(self, verb: str, arguments: tuple[object, ...], answers: bool) -> None:
        try:
            self._pipe.send((verb, arguments, answers))
        except BrokenPipeError:
            raise self._dead() from None

    def _dead(self) -> AssertionError:
        return AssertionError(f"{self.seat.engine} {self.seat.rank} died with {self.await_death()}")

    def look(self) -> None:
        """Take in what has been told, by one that died too."""
        with suppress(EOFError, ConnectionResetError):
            while not self.stopped and self._pipe.poll(0):
                self._take(*self._pipe.recv())

    def _take(self, kind: str, value: Any) -> None:
        assert kind == "ending", f"{self.seat.engine} {self.seat.rank} {value}"
        self.endings.append(value)

    def kill(self) -> None:
        """SIGKILL, and what it had told before."""
        self._process.kill()
        self._process.join(10)
        self.stopped = False
        self.look()

    def stop(self) -> None:
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def sleeps(self) -> bool:
        """Whether the process has been stopped, by itself or another."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        self.stopped = stat.rsplit(")", 1)[1].split()[0] == "T"
        return self.stopped

    def await_stop(self, within_s: float = 20) -> None:
        """Wait until the process is stopped."""
        deadline = time.monotonic() + within_s
        while not self.sleeps():
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.01)

    def await_death(self, within_s: float = 60) -> int | None:
        self._process.join(within_s)
        return self._process.exitcode

    def leave(self) -> int | None:
        """Let the process close its mover and end by itself; its exit code."""
        self._pipe.send(("leave", (), False))
        return self.await_death()


def _serve(pipe: Any, seat: Seat) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(seat.environment)
    if seat.network is not None:
        enter(seat.network)
    rank = Rank(seat)
    with suppress(EOFError):  # whoever told us what to do is gone
        _obey(pipe, rank)


def _obey(pipe: Any, rank: Rank) -> None:
    while True:
        while pipe.poll(BUSY_S if rank.busy else IDLE_S):
            verb, arguments, answers = pipe.recv()
            if verb == "leave":
                rank.close()
                return
            try:
                value = getattr(rank, verb)(*arguments)
            except Exception as error:
                pipe.send(("trouble", f"{verb}: {error!r}"))
                continue
            if answers:
                pipe.send(("answer", value))
            elif isinstance(value, Ending):
                pipe.send(("ending", value))
        for ending in rank.poll():
            pipe.send(("ending", ending))
        time.sleep(rank.naps_s)
