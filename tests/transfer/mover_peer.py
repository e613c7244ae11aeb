"""A mover in a process of its own, as tests drive it: told what to do over a pipe."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mover_fleets import POISON
from releases import becomes_the_release_before, becomes_this_release

from kvmover.errors import KvmoverError, TransferFailed
from kvmover.kernels.convert_reference import decode, encode
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.layout.codec import named
from kvmover.plan.cost import Costs, Route
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.memory.copier import Copier, Done
from kvmover.transfer.memory.work import Work
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.auth import Key, Keys
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Transfer
from kvmover.transport import NixlTransport
from tests.peer_processes import start_peer

COMPONENTS = (Component("attention", 2, 2, 2, 64, "bfloat16"), Component("keys", 2, 1, 1, 24, "uint8"))
PAGES = 64
DEADLINE_S = 20.0
PAUSE_S = 100e-6

#: Chunks of a few pages, and room for two of them: a request takes many rounds.
CONFIG = MoverConfig(
    arena_bytes=64 << 10,
    deadline_s=DEADLINE_S,
    costs=Costs(descriptor_us=1, wire_rate=1e3, gather_rate=1e3, scatter_rate=1e3, chunk_us=10, chunk_bytes=32 << 10),
)


def in_form(component: Component, form: str) -> Component:
    """As an engine stores it that is told so; bytes of which nobody knows anything as they are."""
    if component.form is None or form == "auto":
        return component
    return component.kept_as(named(form, component.dtype, [component.dim]))


class Halting(Copier):
    """Stops its process when a copy is to begin, and copies when that goes on."""

    def run(self, work: Work, done: Done) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        super().run(work, done)


class Side:
    """One rank that is a whole fleet: a mover over NIXL, and a pool whose rows can be made up and hashed."""

    def __init__(
        self,
        engine: str,
        page_tokens: int,
        order: str,
        route: Route | None,
        model: str = "toy",
        pools: str = "zeros",
        stored: tuple[str, float] = ("auto", 0.0),
        release: str = "",
        secret: bytes = b"",
    ) -> None:
        """`stored`: the form of what are numbers, and how much of one may be lost on the way. `release`: "now" or
        "before", of the make-believe ones.
        """
        fleet, (form, lossy) = Fleet(page_tokens=page_tokens), stored
        components = tuple(in_form(component, form) for component in COMPONENTS)
        specs = [PoolSpec.dense(c, fleet.shard(c, 0, 1), PAGES, page_tokens, order) for c in components]
        self._pools = [getattr(Pool, pools)(spec) for spec in specs]
        for pool in self._pools:
            pool.tensors[0].fill_(POISON)
        keys = Keys(Key(secret)) if secret else None
        config = MoverConfig(CONFIG.arena_bytes, DEADLINE_S, costs=CONFIG.costs, route=route, lossy=lossy, keys=keys)
        self.transport = NixlTransport(engine)
        self.mover = Mover(self.transport, Model(model, components), Place(engine, fleet, 0), self._pools, config)
        becomes = {"before": becomes_the_release_before, "now": becomes_this_release}
        self.heard = becomes[release](self.mover) if release else Counter[str]()
        self._transfers: dict[str, Transfer] = {}
        self.naps_s = 0.0

    def poll(self) -> None:
        self.mover.poll()
        time.sleep(self.naps_s)

    def card(self) -> bytes:
        return self.mover.card

    def name(self) -> str:
        return self.transport.name

    def connect(self, card: bytes) -> str:
        """The peer's name, or why it was refused."""
        try:
            return self.mover.connect(card)
        except KvmoverError as error:
            return f"{type(error).__name__}: {error}"

    def slow_down(self, naps_s: float) -> None:
        self.naps_s = naps_s

    def stop_at_a_copy(self) -> None:
        """The process is stopped (SIGSTOP) after the lease for its next copy was looked at, and before it copies."""
        self.mover._core.copier = Halting(self._pools[0].tensors[0].device, None)

    def fill(self, seed: int, pages: Sequence[int], tokens: int) -> str:
        """Make rows up for a request, and their digest."""
        random = np.random.default_rng(seed)
        for rows in self._rows(pages, tokens):
            rows[...] = torch.from_numpy(random.integers(0, 256, rows.shape, np.uint8))
        return self.digest(pages, tokens)

    def digest(self, pages: Sequence[int], tokens: int) -> str:
        """SHA-256 of a request's rows, whatever pool they are in."""
        content = hashlib.sha256()
        for rows in self._rows(pages, tokens):
            content.update(rows.numpy().tobytes())
        return content.hexdigest()

    def digest_in(self, form: str, pages: Sequence[int], tokens: int) -> str:
        """As `digest`, of the same rows in another form, by the definition."""
        content = hashlib.sha256()
        layers = [pool.spec.component.layers * pool.spec.component.kv * tokens for pool in self._pools]
        each = [pool.spec.component for pool, rows in zip(self._pools, layers, strict=True) for _ in range(rows)]
        for component, rows in zip(each, self._rows(pages, tokens), strict=True):
            kept = in_form(component.meant, form)
            if component.form and kept.form:
                numbers = decode(component.form, rows, [1.0] * component.form.scales)
                rows = encode(kept.form, numbers, [1.0] * kept.form.scales)
            content.update(rows.numpy().tobytes())
        return content.hexdigest()

    @staticmethod
    def poisoned_digest(tokens: int) -> str:
        """The digest of rows that nobody ever wrote."""
        token_bytes = sum(c.token_bytes for c in COMPONENTS)
        return hashlib.sha256(bytes([POISON]) * (tokens * token_bytes)).hexdigest()

    def _rows(self, pages: Sequence[int], tokens: int) -> list[torch.Tensor]:
        """Views [head, dim bytes] of every row, by component, layer, kv and position."""
        views: list[torch.Tensor] = []
        for pool in self._pools:
            layout = pool.spec.layout
            for layer in range(layout.extent_of("layer")):
                for kv in range(layout.extent_of("kv")):
                    plane = pool.plane(layer, kv).view(torch.uint8)
                    views += [plane[pages[p // plane.shape[1]], p % plane.shape[1]] for p in range(tokens)]
        return views

    def send(self, request: str, pages: Sequence[int]) -> None:
        self._transfers[request] = self.mover.send(request, [pages] * 2)

    def receive(self, request: str, engine: str, start: int, stop: int, pages: Sequence[int]) -> None:
        self._transfers[request] = self.mover.receive(request, engine, range(start, stop), [pages] * 2)

    def outcome(self, request: str, within_s: float) -> tuple[str, float]:
        """What `landed` returns or raises, and after how long from now."""
        began, transfer = time.monotonic(), self._transfers[request]
        while not transfer.ended and time.monotonic() < began + within_s:
            self.mover.poll()
            time.sleep(PAUSE_S)
        try:
            said = f"landed {transfer.landed().nbytes} bytes {'+'.join(transfer.landed().routes)}"
        except TransferFailed as failed:
            said = f"TransferFailed: {failed}"
        return said, time.monotonic() - began

    def quarantined(self, request: str) -> bool:
        return self._transfers[request].quarantined

    def malformed(self) -> int:
        return self.mover.meter.counts[Count.MALFORMED_MESSAGES]

    def kinds_heard(self) -> dict[str, int]:
        """The messages that a make-believe release has heard, by their kinds."""
        return dict(self.heard)

    def progress(self) -> int:
        """Chunks of all open requests that have arrived, or were written."""
        arrived = sum(len(attempt.state.arrived) for attempt in self.mover._destination._attempts)
        requests = self.mover._source._requests.values()
        return arrived + sum(len(a.state.written) for request in requests for a in request.attempts.values())

    def footprint(self) -> dict[str, int]:
        return footprint()

    def peers(self) -> int:
        """How many peers the mover or its transport remembers."""
        return max(len(self.mover._core.peers._by_name), len(self.transport._peers) + len(self.transport._retired))


def footprint() -> dict[str, int]:
    """What a process may leak: file descriptors, threads, child processes, memory maps, and megabytes."""
    gc.collect()
    own = Path("/proc/self")
    children = (task / "children" for task in (own / "task").iterdir())
    return {
        "file descriptors": len(os.listdir(own / "fd")),
        "threads": len(list((own / "task").iterdir())),
        "child processes": sum(len(path.read_text().split()) for path in children if path.exists()),
        "memory maps": len((own / "maps").read_text().splitlines()),
        "resident MiB": int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


class MoverProcess:
    """`ask(verb, *arguments)` calls a method of `Side` in the other process and returns what it returned."""

    def __init__(self, *arguments: object) -> None:
        self._process, self._pipe = start_peer(_serve, arguments)

    def ask(self, verb: str, *arguments: object) -> Any:
        self._pipe.send((verb, arguments))
        return self.answer()

    def answer(self, within_s: float = 40) -> Any:
        assert self._pipe.poll(within_s), "the process does not answer"
        value, trouble = self._pipe.recv()
        assert trouble is None, trouble
        return value

    def resume(self) -> None:
        """What has stopped itself goes on."""
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def leave(self) -> int | None:
        """Let the process close its mover and end by itself; its exit code."""
        self._pipe.send(("leave", ()))
        self._process.join(20)
        return self._process.exitcode


def _serve(pipe: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    side = Side(*arguments)
    while True:
        if pipe.poll(5 * PAUSE_S):
            verb, arguments = pipe.recv()
            if verb == "leave":
                break
            try:
                pipe.send((getattr(side, verb)(*arguments), None))
            except Exception as error:
                pipe.send((None, repr(error)))
        side.poll()
    side.mover.close()
