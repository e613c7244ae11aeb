"""A transport in a process of its own, as tests drive it: started by spawn, told what to do over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvmover.errors import KvmoverError
from kvmover.transport import Descriptors, Event, Memory, MemoryKind, NixlTransport, Note, nixl_release
from tests.peer_processes import start_peer

POISON = 0xEE
PAUSE_S = 100e-6


class PeerProcess:
    """`ask(command, *arguments)` runs a method of `_Served` in the other process and returns its result. `wheels`:
    folders with packages that the process takes before the environment's.
    """

    def __init__(self, hint: str, nbytes: int, wheels: tuple[str, ...] = ()) -> None:
        self._process, self._pipe = start_peer(_serve, hint, nbytes, wheels)
        self.name, self.metadata, self.address = self._receive(30)

    def ask(self, command: str, *arguments: object) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def tell(self, command: str, *arguments: object) -> None:
        """As `ask`, of a process that may be paused: it does so when it goes on."""
        self._pipe.send((command, arguments))

    def answer(self) -> Any:
        return self._receive(20)

    def runs(self, offset: int, nbytes: int, stride: int, count: int) -> Descriptors:
        return strided(self.address + offset, nbytes, stride, count)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def pause(self) -> None:
        """Returns when none of its threads runs any more."""
        pid = self._process.pid or 0
        os.kill(pid, signal.SIGSTOP)
        stats = [*Path(f"/proc/{pid}/task").glob("*/stat")]
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in stats):
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def leave(self) -> int | None:
        """Let the process close its transport and end by itself; its exit code."""
        self._pipe.send(("stop", ()))
        self._process.join(20)
        return self._process.exitcode

    def _receive(self, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), "the peer process does not answer"
        return self._pipe.recv()


class _Served:
    def __init__(self, transport: NixlTransport, array: np.ndarray) -> None:
        self._transport, self._array = transport, array
        self._notes: list[tuple[str, bytes, bytes]] = []

    def take(self, note: Note) -> None:
        """A note "look 10 4" is kept with the 4 bytes at offset 10 as they are when it arrives."""
        seen = b""
        if note.payload.startswith(b"look "):
            offset, nbytes = (int(word) for word in note.payload.split()[1:3])
            seen = self._array[offset : offset + nbytes].tobytes()
        self._notes.append((note.peer, note.payload, seen))

    def notes(self, at_least: int) -> list[tuple[str, bytes, bytes]]:
        deadline = time.monotonic() + 10
        while len(self._notes) < at_least and time.monotonic() < deadline:
            self.poll()
            time.sleep(PAUSE_S)
        notes, self._notes = self._notes, []
        return notes

    def poll(self) -> None:
        for event in self._transport.poll():
            if isinstance(event, Note):
                self.take(event)

    def anew(self, value: int) -> bytes:
        """Deregister the array, fill it, and register it again: what its owner does who trusts that nobody writes it.
        Returns the new metadata.
        """
        memory = Memory(MemoryKind.HOST, self._array.ctypes.data, self._array.nbytes)
        self._transport.deregister(memory)
        self._array[:] = value
        self._transport.register(memory)
        return self._transport.metadata()

    def fill(self, value: int) -> None:
        self._array[:] = value

    def content(self, nbytes: int) -> np.ndarray:
        return self._array[:nbytes]

    def histogram(self, offset: int) -> list[int]:
        """How often each byte value occurs from `offset` on."""
        return np.bincount(self._array[offset:], minlength=256).tolist()

    def connect(self, metadata: bytes) -> str:
        return self._transport.connect(metadata)

    def write(self, peer: str, local: Descriptors, remote: Descriptors) -> Sequence[Event]:
        """The events until the write is over, notes aside."""
        self._transport.write(peer, local, remote, b"", 10)
        while not (events := [event for event in self._transport.poll() if not isinstance(event, Note)]):
            time.sleep(PAUSE_S)
        return events

    def release(self) -> tuple[int, ...]:
        return nixl_release()

    def notify(self, peer: str, payload: bytes) -> None:
        self._transport.notify(peer, payload)

    def fork(self) -> tuple[str, int | None]:
        """What a forked child gets from `poll`, and its exit code, None if it hangs in Python's own exit."""
        reader, writer = multiprocessing.Pipe()
        child = os.fork()
        if not child:
            try:
                self._transport.poll()
            except KvmoverError as error:
                writer.send(str(error))
            sys.exit(0)
        answer = reader.recv() if reader.poll(10) else "no answer"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return answer, os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return answer, None


def strided(address: int, nbytes: int, stride: int, count: int) -> Descriptors:
    return Descriptors(MemoryKind.HOST, np.array([[address, nbytes, 0, stride, count]], np.int64))


def _serve(pipe: Any, hint: str, nbytes: int, wheels: tuple[str, ...]) -> None:
    sys.path[:0] = wheels
    transport = NixlTransport(hint)
    array = np.full(nbytes, POISON, np.uint8)
    transport.register(Memory(MemoryKind.HOST, array.ctypes.data, nbytes))
    pipe.send((transport.name, transport.metadata(), array.ctypes.data))
    served = _Served(transport, array)
    while True:
        if pipe.poll(PAUSE_S):
            command, arguments = pipe.recv()
            if command == "stop":
                break
            pipe.send(getattr(served, command)(*arguments))
        served.poll()
    transport.close()
