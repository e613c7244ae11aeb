"""Mistakes that give a request the KV of another one: what came of each, and the sentence that an operator reads."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from tests.live.answers import Answer
from tests.live.server import Server
from tests.live.table import Results

#: How the rows of mistakes begin in live.csv.
WRONG_PARTNER = "wrong partner: "

#: Digests in a sentence, of which a row of the table shows the beginning.
_DIGEST = re.compile(r"\b([0-9a-f]{6})[0-9a-f]{26,58}\b")


def sentence(server: Server, words: str, within_s: float = 10.0) -> str:
    """Returns the line of a server's log that has these words, without what stands before kvmover's own sentence."""
    stop = time.monotonic() + within_s
    while True:
        found = [line for line in server.log().splitlines() if words in line]
        if found:
            return _DIGEST.sub(r"\1...", found[-1].partition("] ")[2] or found[-1])
        assert time.monotonic() < stop, f"no line of {server.command.name} has {words!r}"
        time.sleep(0.1)


def mistake(
    results: Results,
    engine: str,
    what: str,
    wanted: Sequence[Answer],
    got: Sequence[Answer],
    again: Callable[[], Sequence[Answer]],
    said: str,
) -> int:
    """Judge the answers to requests that got another one's partner, and those to the same prompts alone afterwards,
    which tell whether the prefix cache took anything of it. Returns how many requests were refused."""
    refused = results.add(engine, f"{WRONG_PARTNER}{what}", wanted, got, said).failed
    alone = results.add(engine, f"{WRONG_PARTNER}{what}, then the same prompts alone", wanted, again())
    assert not alone.failed
    return len(refused)
