"""A process of the demo does what it is told over a pipe, and lets its rank answer peers while it is told nothing."""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, Protocol

#: Between two looks of a rank that has nothing to do. Peers wait for an answer for seconds.
_IDLE_S = 0.05


class Seated(Protocol):
    """What a process can be seated as. Its other methods are verbs."""

    def idle(self) -> None:
        """Answer peers: called some twenty times a second while there is nothing else to do."""
        ...


def main(pipe: Connection) -> None:
    """Answer (verb, arguments) with (value, None) or (None, traceback) until the pipe closes. `seat` takes who can sit:
    a Seat, or that of another kind of process. `close` ends what sits.

    Ctrl-C goes to all processes of a terminal, and is for the parent alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):  # who is killed on purpose is no news; UCX would tell stdout of it
        os.environ.setdefault(name, "FATAL")
    import torch

    torch.set_num_threads(1)
    rank: Any = None
    while True:
        try:
            verb, arguments = _told(pipe, rank)
        except (EOFError, OSError):
            os._exit(0)  # NIXL's and Gloo's threads are not waited for: nothing is left to save
        try:
            value: Any = None
            if verb == "seat":
                (seat,) = arguments
                rank = seat.sit()
            else:
                value = getattr(rank, verb)(*arguments)
                rank = None if verb == "close" else rank
            said: tuple[Any, str | None] = (value, None)
        except Exception:
            said = (None, traceback.format_exc())
        try:
            pipe.send(said)
        except OSError:
            os._exit(0)  # nobody is there to hear it


def _told(pipe: Connection, rank: Seated | None) -> tuple[str, tuple[Any, ...]]:
    """The next verb, and what it is told with. Raises EOFError or OSError where nobody is left to tell."""
    while rank is not None and not pipe.poll(_IDLE_S):
        rank.idle()
    return pipe.recv()
