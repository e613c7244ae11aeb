"""Two processes of one host with a mover each, and a plain buffer of as many bytes: what transfers are timed on."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeGuard

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import Costs
from kvmover.transfer.config import Exports, MoverConfig
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import Completed, Descriptors, Event, Memory, Note, memory_of
from kvmover.transport.nixl import NixlTransport
from perf.network_cable import enter

#: 64 KiB a token, and pages of 1 MiB.
LAYERS, HEADS, TOKENS, PAGE_TOKENS = 16, 4, 4096, 16
COMPONENT = Component.attention(LAYERS, HEADS, 256, "bfloat16")
FLEET = Fleet(page_tokens=PAGE_TOKENS)
PAGES = TOKENS // PAGE_TOKENS
NBYTES = TOKENS * COMPONENT.token_bytes
#: Two chunks of 16 MiB: what is granted stays in the last cache.
ARENA_BYTES = 33 << 20
PAUSE_S = 50e-6

#: Largest relative error of a number in fp8_e4m3.
LOSSY = 0.0625
MEET_S = 60.0
ECHO = b"there and back "


@dataclass(slots=True)
class Side:
    """One process: a mover on a pool, and a plain buffer in the same agent. One agent: each has a thread that polls."""

    mover: Mover
    transport: NixlTransport
    buffer: Memory
    keep: object


def build(engine: str, order: str, device: str, component: Component = COMPONENT) -> Side:
    import torch

    torch.set_num_threads(1)  # two teams of spinning workers on two cores starve each other
    spec = PoolSpec.dense(component, FLEET.shard(component, 0, TOKENS), PAGES, PAGE_TOKENS, order)
    # Whatever the route is, the pools are the same.
    pool = Pool.shared(spec) if device == "cpu" else Pool.zeros(spec, device)
    pool.tensors[0].random_(0, 255)
    buffer = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device=device)
    transport = NixlTransport(engine)
    transport.register(memory_of(buffer))
    place, config = Place(engine, FLEET, 0), MoverConfig(arena_bytes=ARENA_BYTES, exports=Exports.POOLS, lossy=LOSSY)
    mover = Mover(transport, Model("bench", (component,)), place, [pool], config)
    return Side(mover, transport, memory_of(buffer), (pool, buffer))


def destination(pipe: Connection, device: str, component: Component = COMPONENT, network: str = "") -> None:
    """Receive what it is told to, and answer how long it took from asking to landed; send notes back; or answer the
    costs that it has measured, in place of those of a config.

    `network`: the namespace to do so in, "" for this one.
    """
    if network:
        enter(network)
    side = build("decode", "HND", device, component)
    pipe.send((side.transport.name, side.buffer))
    side.mover.connect(pipe.recv())
    side.mover.poll()  # what it says to the peer leaves with a poll
    pages = np.arange(PAGES)
    for told in iter(pipe.recv, None):
        if isinstance(told, int):
            echo(side.transport, told)
            continue
        if isinstance(told, MoverConfig):
            pipe.send(measured(side, told))
            continue
        config, request, tokens = told
        side.mover.configure(config)
        transfer = side.mover.receive(request, "prefill", range(tokens), [pages])
        side.mover.wait([transfer])
        pipe.send(transfer.landed().seconds)
    side.mover.close()


def measured(side: Side, config: MoverConfig) -> Costs:
    """Returns the costs of a config with what a side has measured in their place."""
    return side.mover.calibrations()[0].costs(config.costs)


def echo(transport: NixlTransport, times: int) -> None:
    while times:
        for event in transport.poll():
            if asked(event):
                transport.notify(event.peer, event.payload)
                times -= 1
        time.sleep(PAUSE_S)


def asked(event: Event) -> TypeGuard[Note]:
    """Whether it is one of the notes that are timed; movers may have sent others."""
    return isinstance(event, Note) and event.payload.startswith(ECHO)


class Pair:
    """The source is this process. `component`: of the destination, perhaps in another form; `network`: see there."""

    def __init__(self, device: str = "cpu", component: Component = COMPONENT, network: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=destination, args=(theirs, device, component, network), daemon=True)
        self._process.start()
        self.side = build("prefill", "NHD", device)
        self._peer, self._remote = self._pipe.recv()
        self._pipe.send(self.side.mover.card)
        self._pages = np.random.default_rng(0).permutation(PAGES)
        deadline = time.monotonic() + MEET_S
        while not self.side.mover._core.peers.get(self._peer):
            assert time.monotonic() < deadline, f"{self._peer} has not come in {MEET_S} s"
            self.side.mover.poll()

    def contiguous(self, nbytes: int, verb: Verb = Verb.PUSH) -> float:
        """Seconds of one write or read, without a mover."""
        began = time.perf_counter()
        ends = [Descriptors.runs(memory.kind, [memory.address], nbytes) for memory in (self.side.buffer, self._remote)]
        transport = self.side.transport
        (transport.write if verb is Verb.PUSH else transport.read)(self._peer, ends[0], ends[1], b"", 60.0)
        while not any(isinstance(event, Completed) for event in self.side.transport.poll()):
            time.sleep(PAUSE_S)
        return time.perf_counter() - began

    def round_trips(self, times: int) -> list[float]:
        """Seconds of notes there and back, both sides polling as movers do."""
        self._pipe.send(times)
        samples: list[float] = []
        for number in range(times):
            began = time.perf_counter()
            self.side.transport.notify(self._peer, ECHO + b"%d" % number)
            while not any(map(asked, self.side.transport.poll())):
                time.sleep(PAUSE_S)
            samples.append(time.perf_counter() - began)
        return samples

    def moved(self, config: MoverConfig, tokens: int) -> float:
        """Seconds of a request, from asking to landed, as the destination sees it."""
        request = f"{time.monotonic_ns()}"
        self.side.mover.configure(config)
        offered = self.side.mover.send(request, [self._pages])
        self._pipe.send((config, request, tokens))
        self.side.mover.wait([offered])
        offered.landed()
        return float(self._pipe.recv())

    def costs(self, config: MoverConfig) -> Costs:
        """Returns the costs of a config as the side has measured them that writes or reads."""
        if config.verb is Verb.PUSH:
            return measured(self.side, config)
        self._pipe.send(config)
        found: Costs = self._pipe.recv()
        return found

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self.side.mover.close()
