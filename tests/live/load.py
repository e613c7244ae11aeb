"""A load on servers: clients that send one request after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served(Generic[T]):
    """A request and what came of it. `began`, `ended`: by the clock that does not turn back."""

    prompt: list[int]
    answer: T
    began: float
    ended: float


class Load(Generic[T]):
    """Clients that send one request after another until they are told to stop; each rests `rest_s` between two."""

    def __init__(
        self, serve: Callable[[list[int]], T], prompts: Iterable[list[int]], clients: int = 4, rest_s: float = 0.0
    ) -> None:
        self.done = list[Served[T]]()
        self._serve, self._prompts, self._rest_s = serve, iter(prompts), rest_s
        self._stop, self._changed = threading.Event(), threading.Condition()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._send) for _ in range(clients)]

    def _send(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                prompt = next(self._prompts)
            began = monotonic()
            answer = self._serve(prompt)
            with self._changed:
                self.done.append(Served(prompt, answer, began, monotonic()))
                self._changed.notify_all()
            self._stop.wait(self._rest_s)

    def more(self, requests: int, counts: Callable[[T], bool] = lambda _: True) -> None:
        """Wait until so many more have been answered, of those whose answer counts."""

        def counted() -> int:
            return sum(counts(each.answer) for each in self.done)

        with self._changed:
            wanted = counted() + requests
            assert self._changed.wait_for(lambda: counted() >= wanted or self._failed(), 120), "clients wait"
        for client in self._clients:
            assert not client.done(), client.result()

    def _failed(self) -> bool:
        return any(client.done() for client in self._clients)

    def end(self) -> list[Served[T]]:
        """Returns all requests, when the last is answered."""
        self._stop.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()
        return self.done
