"""A Crew is the demo's processes, spawned once, which serve as the ranks of one fleet after another."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from kvmover.errors import TransferFailed
from kvmover.tools.demo import verbs

#: What ends a program that does not catch it.
_ENDING = (signal.SIGINT, signal.SIGTERM)

#: Processes that have nothing left to do end so soon.
END_S = 5.0

#: Longer than any wait inside a rank, each of which has its own deadline.
ANSWER_S = 90.0


class CrewError(TransferFailed):
    """A rank that failed, died or did not answer: the message has its traceback or exit code."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process and the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def tell(self, verb: str, *arguments: object) -> None:
        """Have it do a verb; `answer` waits for what that returns. Raises CrewError."""
        try:
            self.pipe.send((verb, arguments))
        except OSError as error:
            raise CrewError(f"process {self.process.pid} has ended: {error.strerror}") from None

    def answer(self) -> Any:
        """What the last verb returned. Raises CrewError."""
        if not self.pipe.poll(ANSWER_S):
            raise CrewError(f"process {self.process.pid} did not answer within {ANSWER_S:.0f} s")
        try:
            value, trouble = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(1)
            raise CrewError(f"process {self.process.pid} ended with exit code {self.process.exitcode}") from None
        if trouble is not None:
            raise CrewError(f"process {self.process.pid} failed:\n{trouble}")
        return value


class Crew:
    """`size` spawned processes (a forked child hangs in NIXL). Use as a context manager: it ends them all.

    They end by themselves when all is done, and are killed when anything is raised: nobody waits for their work then.
    """

    def __init__(self, size: int) -> None:
        self.members: list[Member] = []
        try:
            resource_tracker.ensure_running()  # with the first process it would unblock signals
            with _undisturbed():
                for _ in range(size):
                    self.members.append(self._spawned())
        except BaseException:
            self._kill()
            raise

    def renew(self) -> None:
        """Spawn others in the places of those that were killed."""
        for place, member in enumerate(self.members):
            if not member.process.is_alive():
                member.process.join()
                member.pipe.close()
                with _undisturbed():
                    self.members[place] = self._spawned()

    def _spawned(self) -> Member:
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(target=verbs.main, args=(far,), daemon=True)
        process.start()
        far.close()
        return Member(process, near)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for member in self.members:
            member.pipe.close()
        if kind is None:
            deadline = time.monotonic() + END_S
            for member in self.members:
                member.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.join()


@contextmanager
def _undisturbed() -> Generator[None]:
    """Signals wait, so that nothing is left half spawned; and are blocked in what is spawned, until it says otherwise.

    Blocking them in this thread alone would not do: others take them, and Python runs the handler here all the same.
    """
    waiting: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {each: signal.signal(each, lambda number, frame: waiting.append(number)) for each in _ENDING}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in dict.fromkeys(waiting):
            signal.raise_signal(number)


def ask(members: Sequence[Member], verb: str, arguments: Iterable[tuple[object, ...]]) -> list[Any]:
    """Tell every member before hearing any: what they do, they do together."""
    for member, own in zip(members, arguments, strict=True):
        member.tell(verb, *own)
    return [member.answer() for member in members]


def hear(members: Sequence[Member]) -> list[Any]:
    """What each has to say of the verb it was told. Raises the first CrewError, once all have been heard."""
    heard: list[Any] = []
    troubles: list[CrewError] = []
    for member in members:
        try:
            heard.append(member.answer())
        except CrewError as error:
            troubles.append(error)
    for trouble in troubles:
        raise trouble
    return heard


def ask_all(members: Sequence[Member], verb: str, *arguments: object) -> list[Any]:
    """The same for all."""
    return ask(members, verb, [arguments] * len(members))
