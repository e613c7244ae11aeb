"""A rank of generation 1 that kills itself at a chosen call, before or after it: `keeper_peer.py LOCATION`.

It forks a child for each call of a whole run, which is all that is imported here, and prints a line a child: which call
was its last, and the salts of the batches whose puts were answered.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.layout import Fleet
from kvmover.store import PageStore, Policy

#: What a client asks of the system: questions, answers, payloads.
CALLS: tuple[tuple[Any, str], ...] = ((socket.socket, "send"), (socket.socket, "recvmsg"), (os, "pwritev"))
BATCH = 3


class Killer:
    """Counts calls; the one with number `last` is this process's last, before it or after it."""

    def __init__(self, last: int, when: str) -> None:
        self.left, self.when = last, when

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0 and self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            answer = call(*arguments)
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return counted


def live(location: str, name: str, told: int) -> None:
    """Put and get two batches, over more than one slab, and say after each what was promised."""
    with PageStore.open(location, SPACE, Policy(segment_bytes=24 << 10)) as store:
        rank = Rank.of(store, GQA, Fleet(tp=4, page_tokens=PAGE), 0)
        for batch in range(2):
            pages = pages_of(BATCH, f"{name} {batch}")
            answers = rank.put(pages)
            assert all(answer.ok for answer in answers), answers
            os.write(told, f"{name} {batch}\n".encode())
            assert all(answer.ok for answer in rank.get(pages))
        store.flush()


def main(location: str) -> None:
    last = 0
    while True:
        survived = False
        for when in ("before", "after"):
            name = f"{when} {last}"
            reader, told = os.pipe()
            child = os.fork()
            if not child:
                killer = Killer(last, when)
                for place, call in CALLS:
                    setattr(place, call, killer.wrap(getattr(place, call)))
                live(location, name, told)
                os._exit(0)
            os.close(told)
            with os.fdopen(reader) as heard:
                promised = heard.read().splitlines()
            _, status = os.waitpid(child, 0)
            survived = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            assert survived or killed, status
            line = {"name": name, "promised": promised, "survived": survived}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        if survived:
            return
        last += 1


if __name__ == "__main__":
    main(sys.argv[1])
