"""One end of a transfer in a process of its own, driven over a pipe: what the tests between processes move with."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import HOST, Route
from kvmover.transfer.handshake import Model, Place
from kvmover.transfer.mover import Mover
from kvmover.transfer.result import MoverConfig, Result, Transfer
from kvmover.transport.nixl import NixlTransport

ANSWER_S = 60.0
TOKENS = 200
KV = Component.attention(3, 4, 32, "bfloat16")
SIDES = {"prefill": (Fleet(page_tokens=16), "NHD"), "decode": (Fleet(page_tokens=24), "HND")}


class End:
    """A pool of random bytes and a mover on it. Page tables name every other page."""

    def __init__(self, engine: str, model: str = "tiny", deadline_s: float = 20.0) -> None:
        fleet, order = SIDES[engine]
        count = -(-TOKENS // fleet.page_tokens)
        spec = PoolSpec.dense(KV, fleet.shard(KV, 0, TOKENS), 2 * count + 1, fleet.page_tokens, order)
        self.pool = Pool(spec, (torch.randint(0, 256, (spec.allocation_bytes,), dtype=torch.uint8),))
        self.pages = [2 * (count - number) - 1 for number in range(count)]
        config = MoverConfig(arena_bytes=1 << 20, costs=HOST, deadline_s=deadline_s)
        self.mover = Mover(NixlTransport(engine), Model(model, (KV,)), Place(engine, fleet, 0), [self.pool], config)
        self.open: dict[str, Transfer] = {}

    def card(self) -> bytes:
        return self.mover.card

    def connect(self, card: bytes) -> None:
        self.mover.connect(card)

    def take(self, route: Route) -> None:
        self.mover._core.config = MoverConfig(arena_bytes=1 << 20, costs=HOST, deadline_s=20.0, route=route)

    def offer(self, request: str) -> None:
        self.open[request] = self.mover.send(request, [self.pages])

    def ask(self, request: str) -> None:
        self.open[request] = self.mover.receive(request, "prefill", range(TOKENS), [self.pages])
        self.mover.poll()

    def hear(self, name: str) -> None:
        """Poll until `name` has been met and has asked for something."""
        until = time.monotonic() + ANSWER_S
        while not any(name in want for _, want in self.mover._outbound._early):
            assert time.monotonic() < until, "nobody asked"
            self.mover.poll()
            time.sleep(1e-3)

    def finish(self, request: str) -> Result | None:
        transfer = self.open.pop(request)
        self.mover.wait([transfer])
        return transfer.result

    def digest(self) -> str:
        """SHA-256 of the request's rows, in logical order."""
        positions = torch.arange(TOKENS)
        page_tokens = self.pool.spec.page_tokens
        where = torch.tensor(self.pages)[positions // page_tokens], positions % page_tokens
        planes = [self.pool.plane(layer, kv)[where] for layer in range(KV.layers) for kv in range(KV.kv)]
        return hashlib.sha256(torch.stack(planes).view(torch.uint8).numpy().tobytes()).hexdigest()

    def neighbours(self) -> str:
        """SHA-256 of every page that the request does not use."""
        planes = [self.pool.plane(layer, kv)[0::2] for layer in range(KV.layers) for kv in range(KV.kv)]
        return hashlib.sha256(torch.stack(planes).view(torch.uint8).numpy().tobytes()).hexdigest()

    def close(self) -> None:
        self.mover.close()


def main(pipe: Connection, engine: str, model: str) -> None:
    torch.set_num_threads(1)
    end = End(engine, model)
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((getattr(end, verb)(*arguments), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


@dataclass
class Remote:
    """The handle on a process. `call` raises AssertionError with the far traceback."""

    process: BaseProcess
    pipe: Connection

    def call(self, verb: str, *arguments: object) -> Any:
        self.tell(verb, *arguments)
        return self.answer()

    def tell(self, verb: str, *arguments: object) -> None:
        self.pipe.send((verb, arguments))

    def answer(self) -> Any:
        assert self.pipe.poll(ANSWER_S), "no answer in time"
        value, trouble = self.pipe.recv()
        assert trouble is None, trouble
        return value


@contextmanager
def running(engine: str, model: str = "tiny"):
    """A spawned end, killed when the test is over."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=main, args=(far, engine, model), daemon=True)
    process.start()
    far.close()
    try:
        yield Remote(process, near)
    finally:
        near.close()
        process.kill()
        process.join(10)
