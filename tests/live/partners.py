"""Mistakes that give a request the KV of another one: what came of each, and the sentence that an operator reads."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

from perf import record
from perf.wrong_partner import AFTERWARDS, WRONG_PARTNER
from tests.live.answers import Answer, judge, prompts_of
from tests.live.server import Server
from tests.live.table import Results

#: Digests in a sentence, and folders before a name, of which a row of the table shows the beginning and the end.
_DIGEST = re.compile(r"\b([0-9a-f]{6})[0-9a-f]{26,58}\b")
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[\w.-]+/)+(?=[\w.-])")

#: What engines write before kvmover's own words: time and rank, or the exception that SGLang has made of them.
_BEFORE = re.compile(r"^.*?\] |^.*?KVTransferError\(bootstrap_room=\d+\): ")

#: How a router mixes two prompts up, by the name of the mistake: the one that is prefilled, and the one to be decoded.
MIX_UPS: Mapping[str, Callable[[list[int], list[int]], tuple[list[int], list[int]]]] = {
    "KV of another prompt of the same length": lambda one, other: (one, other),
    "KV of a longer prompt": lambda one, other: (one, other[:-10]),
    "KV of a shorter prompt": lambda one, other: (one[:-10], other),
    "KV of the chat's turn before": lambda one, other: (one, one + other[:40]),
}

#: Lengths of the prompts that are mixed up.
_LENGTHS = (500, 300, 64, 17)


def mixed_up(mistake: str, seed: int) -> list[tuple[list[int], list[int]]]:
    """Returns pairs of a prompt that is prefilled and one that is decoded with its KV, by a mistake of MIX_UPS."""
    drawn = prompts_of(2 * len(_LENGTHS), seed, least_tokens=512, most_tokens=512)
    return [MIX_UPS[mistake](drawn[2 * at][:n], drawn[2 * at + 1][:n]) for at, n in enumerate(_LENGTHS)]


def sentence(server: Server, words: str, within_s: float = 10.0) -> str:
    """Returns the last line of a server's log that has these words, without what stands before kvmover's sentence."""
    stop = time.monotonic() + within_s
    while True:
        found = [line for line in server.log().splitlines() if words in line]
        if found:
            return legible(found[-1])
        assert time.monotonic() < stop, f"no line of {server.command.name} has {words!r}"
        time.sleep(0.1)


def legible(line: str) -> str:
    """Returns kvmover's sentence of a line of a log, with digests cut and without the folders of this machine."""
    told = line
    while (rest := _BEFORE.sub("", told, count=1)) != told:
        told = rest
    return _FOLDERS.sub(".../", _DIGEST.sub(r"\1...", told))


def mistake(
    results: Results,
    engine: str,
    what: str,
    wanted: Sequence[Answer],
    got: Sequence[Answer],
    again: Callable[[], Sequence[Answer]],
    said: str,
) -> int:
    """Judge the answers to requests that got another one's partner, and those to the same prompts afterwards, which
    tell whether a prefix cache took anything of it. Returns how many requests were refused."""
    refused = results.add(engine, f"{WRONG_PARTNER}{what}", wanted, got, said).failed
    alone = results.add(engine, f"{WRONG_PARTNER}{what}{AFTERWARDS}", wanted, again())
    assert not alone.failed
    return len(refused)


def theirs(
    engine: str,
    connector: str,
    what: str,
    wanted: Sequence[Answer],
    got: Sequence[Answer],
    again: Callable[[], Sequence[Answer]],
    within_s: float,
    wanted_again: Sequence[Answer] | None = None,
) -> bool:
    """Keep a row of how an engine's own connector answers a mistake and then the same prompts, in the place of its last
    one in perf/results/live_partners.csv. No answer fails this. `within_s`: how long a client waited for each.
    `wanted_again`: what `again` is to give, where that is something else.

    Returns whether all of the same prompts were answered then.
    """
    first, then = judge(wanted, got), judge(wanted if wanted_again is None else wanted_again, after := again())
    row = {
        "engine": engine,
        "connector": connector,
        "mistake": what,
        "requests": first.requests,
        "same": first.same,
        "wrong": len(first.wrong),
        "refused": sum(bool(answer.status) for answer in got if not answer.ok),
        "unanswered": sum(not answer.status for answer in got),
        "within_s": f"{within_s:g}",
        "then_requests": then.requests,
        "then_wrong": len(then.wrong),
        "then_failed": len(then.failed),
    }
    record.replace("live_partners", [row], ("engine", "mistake"))
    return all(answer.ok for answer in after)
