"""A process of the demo executes verbs from a pipe, and lets its rank answer peers in between."""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kvmover.errors import KvmoverError

#: Pause between polls of an idle rank, s. Peers wait for an answer for seconds.
_IDLE_S = 0.05


class Seated(Protocol):
    """A rank that a process is seated as. Its other methods are verbs."""

    def idle(self) -> None:
        """Answer peers: called some twenty times a second while the pipe is idle."""
        ...


def main(pipe: Connection) -> None:
    """Answer (verb, arguments) with (value, None) or (None, error) until the pipe closes.

    The error is the sentence of a KvmoverError, and the traceback of any other.

    `seat` takes a Seat, or that of another kind of rank. `close` ends the rank. Ctrl-C goes to all processes of a
    terminal, and is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):  # deliberate kills are no news; UCX would print them on stdout
        os.environ.setdefault(name, "FATAL")
    import torch

    torch.set_num_threads(1)
    rank: Any = None
    while True:
        try:
            verb, arguments = _told(pipe, rank)
        except (EOFError, OSError):
            os._exit(0)  # skips waiting for NIXL's and Gloo's threads: no state is left to save
        try:
            value: Any = None
            if verb == "seat":
                (seat,) = arguments
                rank = seat.sit()
            else:
                value = getattr(rank, verb)(*arguments)
                rank = None if verb == "close" else rank
            said: tuple[Any, str | None] = (value, None)
        except KvmoverError as error:
            said = (None, str(error))
        except Exception:
            said = (None, traceback.format_exc())
        try:
            pipe.send(said)
        except OSError:
            os._exit(0)  # the parent is gone


def _told(pipe: Connection, rank: Seated | None) -> tuple[str, tuple[Any, ...]]:
    """Wait for the next verb and its arguments while the rank idles. Raises EOFError or OSError without a parent."""
    while rank is not None and not pipe.poll(_IDLE_S):
        rank.idle()
    return pipe.recv()
