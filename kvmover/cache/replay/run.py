"""Replaying a trace: every request through one server, and what it came to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvmover.cache.replay.report import Report
from kvmover.cache.replay.server import Server
from kvmover.cache.replay.setup import Setup
from kvmover.cache.replay.trace import Request


def replay(requests: Sequence[Request], setup: Setup, step: Callable[[int], object] = int) -> Report:
    """Serve `requests` in order; `step` is told how many more are done. Raises SetupError for one that cannot be."""
    server = Server(setup)
    began = time.perf_counter()
    every = max(1, len(requests) // 200)
    for number, request in enumerate(requests, start=1):
        server.serve(request)
        if number % every == 0:
            step(every)
    seconds = time.perf_counter() - began
    step(len(requests) % every)
    return Report(setup, len(requests), server.ledger.total().first, seconds, server.residency)
