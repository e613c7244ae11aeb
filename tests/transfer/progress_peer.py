"""A mover with a progress thread in a process of its own, over NIXL, as tests drive it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from mover_peer import MoverProcess, Side

from kvmover.transfer.meter import Count
from kvmover.transfer.threads.progress import Progress
from kvmover.transfer.threads.wrappers import AsyncMover, SharedMover
from tests.peer_processes import start_peer

WITHIN_S = 20.0


class ThreadedSide(Side):
    """Nobody polls it."""

    def __init__(self, engine: str, page_tokens: int, order: str) -> None:
        super().__init__(engine, page_tokens, order, None)
        self.progress = Progress(self.mover)
        self.mover = SharedMover(self.progress)

    def send_from_threads(self, requests: dict[str, list[int]]) -> list[str | None]:
        """Every request from a thread of its own; why each failed."""

        def send(request: str, pages: list[int]) -> str | None:
            transfer = self.mover.send(request, [pages] * 2)
            self.mover.wait([transfer], WITHIN_S)
            assert transfer.result is not None
            return transfer.result.reason

        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(send, requests, requests.values()))

    def receive_in_tasks(self, requests: dict[str, list[int]], engine: str, tokens: int) -> list[str | None]:
        """Every request in a task of one event loop; why each failed."""

        async def main() -> list[str | None]:
            mover = AsyncMover(self.progress)
            asked = [mover.receive(name, engine, range(tokens), [pages] * 2) for name, pages in requests.items()]
            return [result.reason for result in await asyncio.gather(*asked)]

        return asyncio.run(asyncio.wait_for(main(), WITHIN_S))

    def digests(self, tables: Sequence[Sequence[int]], tokens: int) -> list[str]:
        return [self.digest(pages, tokens) for pages in tables]

    def fill_all(self, tables: Sequence[Sequence[int]], tokens: int) -> list[str]:
        return [self.fill(seed, pages, tokens) for seed, pages in enumerate(tables)]

    def polls_while_idle(self, seconds: float) -> int:
        before = self.mover.snapshot().meter.counts[Count.POLLS]
        time.sleep(seconds)
        return self.mover.snapshot().meter.counts[Count.POLLS] - before

    def close(self) -> None:
        self.mover.close()


class ThreadedProcess(MoverProcess):
    """Serves one call after the other, and leaves without closing anything."""

    def __init__(self, *arguments: object) -> None:
        self._process, self._pipe = start_peer(_serve, arguments)

    def tell(self, verb: str, *arguments: object) -> None:
        """As `ask`, for an answer that is fetched later."""
        self._pipe.send((verb, arguments))


def _serve(pipe: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    side = ThreadedSide(*arguments)
    for verb, parameters in iter(pipe.recv, ("leave", ())):
        try:
            pipe.send((getattr(side, verb)(*parameters), None))
        except Exception as error:
            pipe.send((None, repr(error)))
