"""Movers with a thread each in one process: a loopback that threads may share, and a pair that is driven by itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from mover_fleets import CONFIG, Bench, Pair

from kvmover.layout import Component, Fleet
from kvmover.transfer.config import MoverConfig, Pace
from kvmover.transfer.threads.progress import Progress
from kvmover.transfer.threads.wrappers import SharedMover
from kvmover.transport import LoopbackNetwork, LoopbackTransport, Transport
from kvmover.transport.base import Event


class SharedNetwork(LoopbackNetwork):
    """A loopback whose members are polled by different threads: NIXL does its own locking, this one does none."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        with self.lock:
            super().tell(sender, peer, note)

    def carry(self, sender, flight) -> None:
        with self.lock:
            super().carry(sender, flight)

    def deliver(self) -> None:
        with self.lock:
            super().deliver()


class SharedTransport(LoopbackTransport):
    """Remembers who polled it."""

    def __init__(self, network: SharedNetwork, name: str) -> None:
        super().__init__(network, name)
        self.pollers: set[threading.Thread] = set()

    def poll(self) -> list[Event]:
        self.pollers.add(threading.current_thread())
        with self._network.lock:
            return super().poll()


@dataclass(slots=True)
class ThreadedBench(Bench):
    network: SharedNetwork = field(default_factory=SharedNetwork)

    def transport(self, name: str) -> Transport:
        return SharedTransport(self.network, name)


@dataclass(slots=True)
class Threads:
    """A pair of engines, one rank each, whose movers run by themselves once `start` was called."""

    pair: Pair
    progress: list[Progress] = field(default_factory=list)

    @classmethod
    def of(cls, config: MoverConfig = CONFIG, tokens: int = 100, pages: int = 64) -> Threads:
        """As Pair.of: 1 KiB a token, four tokens a page and a chunk. No probes, so that all that flies are chunks."""
        component = Component("attention", 2, 2, 2, 64, "bfloat16")
        bench = ThreadedBench((component,), replace(config, sandbox_bytes=0))
        source = bench.engine("prefill", Fleet(page_tokens=4), pages=pages)
        target = bench.engine("decode", Fleet(page_tokens=4), "HND", pages=pages)
        target.connect(source)
        bench.turn()
        return cls(Pair.request(bench, source, target, tokens))

    def start(self, pace: Pace | None = None) -> tuple[SharedMover, SharedMover]:
        """(the mover of the source, that of the destination)."""
        self.progress = [Progress(engine.movers[0], pace) for engine in (self.pair.src, self.pair.dst)]
        source, target = (SharedMover(progress) for progress in self.progress)
        return source, target

    def close(self) -> None:
        for progress in self.progress:
            progress.close()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
