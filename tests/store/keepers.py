"""Keepers as the tests start them: several in one process of their own, each in a thread."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvmover.store.keeper import keeper_machine as machine
from kvmover.store.keeper import memory
from kvmover.store.keeper.server import KeeperServer
from kvmover.store.keeper.state import KeeperEvent

#: Of each keeper here.
CAPACITY_BYTES = 64 << 20


def location(folder: Path, fleet: str = "", generation: int = 0) -> str:
    """Where the keeper of a folder is, and who comes."""
    return f"keeper://{folder / 'keeper.sock'}?fleet={fleet}&generation={generation}"


def _break(name: str, calls: int) -> None:
    """Have a function of the state machine raise, once, at the call after so many."""
    left, whole = [calls], getattr(machine, name)

    def broken(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            setattr(machine, name, whole)
            raise ZeroDivisionError(f"{name} is broken for this test")
        return whole(*arguments, **named)

    setattr(machine, name, broken)


class LockedServer(KeeperServer):
    """A keeper whose state is read by the tests between two events, never within one."""

    def __init__(self, *arguments: Any) -> None:
        self.lock = threading.RLock()
        super().__init__(*arguments)

    def _step(self, event: KeeperEvent) -> None:
        with self.lock:
            super()._step(event)


def _serve(pipe: Connection, seals: bool) -> None:
    """Answer (verb, folder) until the pipe closes."""
    if not seals:  # so that a test can damage what the kernel would guard
        memory.seal = lambda fd, end: os.ftruncate(fd, end) is None
    keepers: dict[Path, LockedServer] = {}
    while True:
        try:
            verb, folder, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        if verb == "start":
            keepers[folder] = LockedServer(folder / "keeper.sock", *arguments)
            threading.Thread(target=keepers[folder].serve, daemon=True).start()
            pipe.send(None)
        elif verb == "sessions":
            pipe.send(len(keepers[folder].state.sessions))
        elif verb == "slabs":
            pipe.send([Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in keepers[folder]._slabs.values()])
        elif verb == "break":
            _break(*arguments)
            pipe.send(None)
        elif verb == "faults":
            pipe.send(keepers[folder].counts.faults)
        elif verb == "check":
            with keepers[folder].lock:
                keepers[folder].state.check()
            pipe.send(None)


class KeeperProcess:
    """One process, started at the first question, and ended with `close`."""

    def __init__(self, *, seals: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far, seals), daemon=True)
        self.process.start()
        far.close()

    def ask(self, verb: str, folder: Path, *arguments: Any) -> Any:
        self.pipe.send((verb, folder, arguments))
        return self.pipe.recv()

    def start(self, folder: Path, capacity_bytes: int = CAPACITY_BYTES, slab_bytes: int | None = None) -> None:
        """A keeper of its own for a folder."""
        self.ask("start", folder, capacity_bytes, slab_bytes)

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
