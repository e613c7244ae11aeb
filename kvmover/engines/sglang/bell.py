"""Bell: what the thread of a Haul sleeps on: SGLang's socket, and calls that other threads make meanwhile."""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import import_module
from socket import socketpair
from typing import Any


class Bell:
    """`nap` is for one thread, `ring` for all others. The ZeroMQ socket is the engine's, and outlives this."""

    def __init__(self, socket: Any) -> None:
        zmq = import_module("zmq")
        self._socket = socket
        self._ear, self._hand = socketpair()
        for end in (self._ear, self._hand):
            end.setblocking(False)
        self._poller: Any = zmq.Poller()
        for source in (socket, self._ear):
            self._poller.register(source, zmq.POLLIN)

    def nap(self, seconds: float) -> bool:
        """Sleep until there is a message or somebody has rung since the last nap, at most so long.

        Whether there is a message. ZeroMQ counts in milliseconds: naps below one are not cut short.
        """
        whole_ms = int(seconds * 1000)
        if not whole_ms:
            time.sleep(seconds)
        woken: dict[Any, int] = dict(self._poller.poll(whole_ms))
        with suppress(OSError):  # nothing was rung
            self._ear.recv(4096)
        return self._socket in woken

    def ring(self) -> None:
        with suppress(OSError):  # it rings already, or nobody sleeps here any more
            self._hand.send(b"!")

    def close(self) -> None:
        self._ear.close()
        self._hand.close()
