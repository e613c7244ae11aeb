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
from typing import TYPE_CHECKING, Any, Protocol

from kvmover.errors import TransferFailed
from kvmover.tools.demo import verbs

if TYPE_CHECKING:
    from kvmover.tools.demo.scenarios import Scenario

#: Signals that end a program unless caught.
_ENDING = (signal.SIGINT, signal.SIGTERM)

#: Time for idle processes to end, s, and for one that hangs up to have an exit code.
END_S = 5.0

#: Longest wait for an answer, s. A dead process is noticed at once, and ranks have deadlines of their own: this is for
#: one that hangs, and long enough for sixteen processes that import torch on two cores with other work.
ANSWER_S = 600.0


class CrewError(TransferFailed):
    """A failed, dead or silent rank: the message has scenario, engine and rank, and its error or exit code."""


class RankSeat(Protocol):
    """The seat of a rank."""

    @property
    def scenario(self) -> Scenario:
        """Returns the scenario that is played."""
        ...

    @property
    def engine(self) -> str:
        """Returns the engine's name."""
        ...

    @property
    def rank(self) -> int:
        """Returns the rank's number."""
        ...


@dataclass(slots=True, eq=False)
class Member:
    """A process and the pipe to it. `role`: its seat, once it has one; `verb`: the last that it was told."""

    process: BaseProcess
    pipe: Connection
    role: RankSeat | None = None
    verb: str = ""

    def __str__(self) -> str:
        """Returns scenario, engine, rank and process, for messages."""
        if self.role is None:
            return f"process {self.process.pid}"
        return f"scenario {self.role.scenario.name}: rank {self.role.rank} of {self.role.engine}"

    def tell(self, verb: str, *arguments: Any) -> None:
        """Send a verb; `answer` waits for its result. Raises CrewError if the process has ended."""
        self.verb = verb
        if verb == "seat":
            (self.role,) = arguments
        try:
            self.pipe.send((verb, arguments))
        except OSError as error:
            raise CrewError(f"{self} has ended: {error.strerror}") from None

    def answer(self) -> Any:
        """Return the last verb's result. Raises CrewError if the process failed, died, or is silent for ANSWER_S."""
        if not self.pipe.poll(ANSWER_S):
            raise CrewError(f"{self} did not answer `{self.verb}` within {ANSWER_S:.0f} s")
        try:
            value, trouble = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(END_S)
            raise CrewError(f"{self} ended in `{self.verb}` with exit code {self.process.exitcode}") from None
        if trouble is not None:
            raise CrewError(f"{self} failed in `{self.verb}`: {trouble}")
        return value


class Crew:
    """A context manager over `size` spawned processes (a forked child hangs in NIXL); ends them all.

    They end by themselves at a normal exit, and are killed at once after an exception.
    """

    def __init__(self, size: int) -> None:
        self.members: list[Member] = []
        try:
            resource_tracker.ensure_running()  # with the first process it would unblock signals
            self.grow(size)
        except BaseException:
            self._kill()
            raise

    def grow(self, size: int) -> None:
        """Spawn processes until there are `size`."""
        with _undisturbed():
            while len(self.members) < size:
                self.members.append(self._spawned())

    def renew(self) -> None:
        """Spawn processes in the places of dead ones."""
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
    """Delay signals while spawning, so that no process is half spawned; the child blocks them until `verbs.main`.

    Blocking them in this thread alone fails: other threads take them, and Python runs the handler here.
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
    """Tell every member before waiting for any answer, so that they work in parallel."""
    for member, own in zip(members, arguments, strict=True):
        member.tell(verb, *own)
    return [member.answer() for member in members]


def hear(members: Sequence[Member]) -> list[Any]:
    """Return each member's answer. Raises the first CrewError, once all have been heard."""
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
    """Tell all members the same verb and arguments; return their answers."""
    return ask(members, verb, [arguments] * len(members))
