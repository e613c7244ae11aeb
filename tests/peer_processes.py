"""Processes that tests talk to over a pipe, forked from one that has imported torch: a start is no second of imports.

That one has no threads and never touches NIXL.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_IMPORTED = ["torch", "kvmover.transfer.mover", "kvmover.transport"]


def start_peer(serve: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Start a process that runs `serve(pipe, *arguments)` and dies with this one; returns it, and this end of the pipe.

    It has this process' environment as of now.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    pipe, theirs = context.Pipe()
    work = pickle.dumps((serve, arguments))
    process = context.Process(target=_run, args=(theirs, dict(os.environ), work), daemon=True)
    process.start()
    theirs.close()
    return process, pipe


def _run(pipe: Connection, environment: dict[str, str], work: bytes) -> None:
    """`work` is read last: what it imports may read the environment."""
    os.environ.clear()
    os.environ.update(environment)
    serve, arguments = pickle.loads(work)
    serve(pipe, *arguments)
