"""Mistakes that give a request the KV of another one: what came of each, and the sentence that an operator reads."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perf import record
from perf.wrong_partner import AFTERWARDS, WRONG_PARTNER
from tests.live.answers import GAP, ROUNDED, Answer, judge, prompts_of
from tests.live.server import Server
from tests.live.table import Results

#: Digests in a sentence, and folders before a name, of which a row of the table shows the beginning and the end.
_DIGEST = re.compile(r"\b([0-9a-f]{6})[0-9a-f]{26,58}\b")
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[\w.-]+/)+(?=[\w.-])")

#: What engines write before kvmover's own words: time and rank, or the exception that SGLang has made of them.
_BEFORE = re.compile(r"^.*?\] |^.*?KVTransferError\(bootstrap_room=-?\d+\): ")


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, with what else is said of the request: a salt, an adapter."""

    prompt: list[int]
    said: Mapping[str, Any] = field(default_factory=dict[str, Any])


#: What is prefilled, and what is decoded with its KV.
Mixed = tuple[Asked, Asked]

#: How a router mixes two prompts of one length up, by the name of the mistake.
MIX_UPS: Mapping[str, Callable[[list[int], list[int]], Mixed]] = {
    "KV of another prompt of the same length": lambda one, other: (Asked(one), Asked(other)),
    "KV of a longer prompt": lambda one, other: (Asked(one), Asked(other[:-10])),
    "KV of a shorter prompt": lambda one, other: (Asked(one[:-10]), Asked(other)),
    "KV of the chat's turn before": lambda one, other: (Asked(one), Asked(one + other[:40])),
    "KV of another question behind the same head": lambda one, other: (
        Asked(one),
        Asked([*one[: len(one) // 2], *other[len(one) // 2 :]]),
    ),
    "KV under another salt": lambda one, _: (Asked(one, {"cache_salt": "a"}), Asked(one, {"cache_salt": "b"})),
    "KV without a salt for a prompt with one": lambda one, _: (Asked(one), Asked(one, {"cache_salt": "a"})),
}

#: Adapters that are mixed up, by the name of the mistake: prefill's and decode's, each by its name there or "".
ADAPTERS: Mapping[str, tuple[str, str]] = {
    "prefilled with adapter A, decoded with B": ("A", "B"),
    "prefilled without an adapter, decoded with one": ("", "A"),
    "prefilled with an adapter, decoded without": ("A", ""),
    "an adapter of one name and two contents": ("C", "C"),
}

#: Mistakes that only who has such a thing can make.
OTHER_KEY = "a prefill without the decode's key"

#: The one mistake between models whose numbers are bfloat16.
OTHER_DTYPE = "KV of another dtype"
DROPPED = "KV of another prompt, from a router that drops what it does not know"

#: Lengths of the prompts that are mixed up.
_LENGTHS = (500, 300, 64, 17)


def mixed_up(mistake: str, seed: int) -> list[Mixed]:
    """Returns pairs of what is prefilled and what is decoded with its KV, by a mistake of MIX_UPS."""
    drawn = prompts_of(2 * len(_LENGTHS), seed, least_tokens=512, most_tokens=512)
    return [MIX_UPS[mistake](drawn[2 * at][:n], drawn[2 * at + 1][:n]) for at, n in enumerate(_LENGTHS)]


def not_mixed_up(seed: int) -> list[Mixed]:
    """Returns the same requests for both halves: what is wrong is who they are sent to."""
    return [(asked, asked) for asked in map(Asked, prompts_of(4, seed, least_tokens=100, most_tokens=500))]


def adapters_mixed_up(mistake: str, said: Callable[[str], Mapping[str, Any]]) -> list[Mixed]:
    """Returns the same prompts for both halves, by a mistake of ADAPTERS. `said`: of a request for an adapter."""
    one, other = map(said, ADAPTERS[mistake])
    drawn = prompts_of(4, 170 + len(mistake), least_tokens=100, most_tokens=300)
    return [(Asked(prompt, one), Asked(prompt, other)) for prompt in drawn]


def exchanged(seed: int) -> list[Mixed]:
    """Returns requests whose KV is that of their neighbour's prompt."""
    asked = [Asked(prompt) for prompt in prompts_of(4, seed, least_tokens=100, most_tokens=300)]
    return [(one, asked[at ^ 1]) for at, one in enumerate(asked)]


def tells_weights_apart(line: str) -> bool:
    """Returns whether a sentence of two models has a digest for either, and two different ones."""
    found = re.search(r"peer holds weights (\w{12}) of \S+ .*this side holds weights (\w{12}) of \S+ ", line)
    return found is not None and found[1] != found[2]


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
    return shortened(told)


def shortened(sentence: str) -> str:
    """Returns a sentence with digests cut and without the folders of this machine."""
    return _FOLDERS.sub(".../", _DIGEST.sub(r"\1...", sentence))


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
    gap = ROUNDED if what == OTHER_DTYPE else GAP
    refused = results.add(engine, f"{WRONG_PARTNER}{what}", wanted, got, said, gap).failed
    alone = results.add(engine, f"{WRONG_PARTNER}{what}{AFTERWARDS}", wanted, again(), gap=gap)
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
    record.replace("live_partners", [{**row, "said": ""}], ("engine", "mistake"))
    return all(answer.ok for answer in after)


def has_none(engine: str, connector: str, mistakes: Sequence[str], why: str) -> None:
    """Keep a row for each of these mistakes that cannot be made with an engine's own connector: it lacks the thing."""
    counts = (
        "requests",
        "same",
        "wrong",
        "refused",
        "unanswered",
        "within_s",
        "then_requests",
        "then_wrong",
        "then_failed",
    )
    rows = [
        {"engine": engine, "connector": connector, "mistake": what, **dict.fromkeys(counts, 0), "said": why}
        for what in mistakes
    ]
    record.replace("live_partners", rows, ("engine", "mistake"))
