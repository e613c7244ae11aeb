"""Crew: the demo's processes, spawned once, seated as the ranks of one fleet after another, and told what to do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from kvmover.demo import rank
from kvmover.errors import KvmoverError

#: Longer than any wait inside a rank, each of which has its own deadline.
ANSWER_S = 90.0


class CrewError(KvmoverError):
    """A rank that failed, died or did not answer: the message has its traceback or exit code."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process and the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def tell(self, verb: str, *arguments: object) -> None:
        self.pipe.send((verb, arguments))

    def answer(self) -> Any:
        """What the last verb returned. Raises CrewError."""
        if not self.pipe.poll(ANSWER_S):
            raise CrewError(f"process {self.process.pid} did not answer within {ANSWER_S:.0f} s")
        try:
            value, trouble = self.pipe.recv()
        except EOFError:
            self.process.join(1)
            raise CrewError(f"process {self.process.pid} ended with exit code {self.process.exitcode}") from None
        if trouble is not None:
            raise CrewError(f"process {self.process.pid} failed:\n{trouble}")
        return value


class Crew:
    """`size` spawned processes (a forked child hangs in NIXL). Use as a context manager: it ends them all."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.members: list[Member] = []
        for _ in range(size):
            near, far = context.Pipe()
            process = context.Process(target=rank.main, args=(far,), daemon=True)
            process.start()
            far.close()
            self.members.append(Member(process, near))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.pipe.close()
        for member in self.members:
            member.process.join(5)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()


def ask(members: Sequence[Member], verb: str, arguments: Iterable[tuple[object, ...]]) -> list[Any]:
    """Tell every member before hearing any: what they do, they do together."""
    for member, own in zip(members, arguments, strict=True):
        member.tell(verb, *own)
    return [member.answer() for member in members]


def ask_all(members: Sequence[Member], verb: str, *arguments: object) -> list[Any]:
    """The same for all."""
    return ask(members, verb, [arguments] * len(members))
