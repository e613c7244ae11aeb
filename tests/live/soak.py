"""A soak: clients send requests to a prefill and a decode while one or the other is killed and comes back.

`make soak` has it go on for half an hour, in which the prefill alone is killed: its decode has to take no more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import SOAK_S, Servers
from tests.live.load import Load, Served
from tests.live.server import Footprint, Server
from tests.live.table import Results

#: Which half is killed, in turn.
KILLS = ("prefill", "decode", "prefill", "decode")

#: Requests that are answered between two events, and how long a client rests between two of its own.
_BETWEEN, _REST_S = 16, 0.5

#: A request in an outage ends by a deadline of at most so many seconds, and so does a client's wait for it.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A half was killed, and was back."""

    killed: float
    back: float


@dataclass(slots=True)
class Soak:
    """A prefill and a decode, whose `split` answers a prompt. `silence_s`: a peer that answers no ping for so long is
    lost, and a half that was back sooner than that has yet to learn of it from the other."""

    servers: Servers
    prefill: Server
    decode: Server
    split: Callable[[Server, Server, list[int], float], Answer]
    silence_s: float
    outages: list[Outage] = field(default_factory=list[Outage])
    footprints: list[Footprint] = field(default_factory=list[Footprint])

    def run(self, seed: int) -> list[Served[Answer]]:
        """Returns all requests of four clients that went on while halves were killed and came back."""
        prompts, began = prompts_of(20_000, seed, least_tokens=20, most_tokens=400), monotonic()
        load = Load(lambda prompt: self.split(self.prefill, self.decode, prompt, PATIENCE_S), prompts, rest_s=_REST_S)
        try:
            load.more(_BETWEEN, lambda answer: answer.ok)
            for which in KILLS:
                self._killed_and_back(which)
                load.more(_BETWEEN, lambda answer: answer.ok)
            self.footprints.append(self.decode.footprint())
            while monotonic() < began + SOAK_S:
                self._killed_and_back("prefill")
                load.more(_BETWEEN, lambda answer: answer.ok)
            self.footprints.append(self.decode.footprint())
        finally:
            done = load.end()
        return done

    def _killed_and_back(self, which: str) -> None:
        server: Server = getattr(self, which)
        killed = monotonic()
        server.kill()
        setattr(self, which, self.servers.again(server))
        self.outages.append(Outage(killed, monotonic()))


def unexplained(done: Sequence[Served[Answer]], outages: Sequence[Outage], silence_s: float) -> list[str]:
    """Returns what is said of requests that failed, and should not have, or were not told why: a half refuses
    connections in an outage alone; an engine may say until `silence_s` after it that the other half is lost."""
    found = list[str]()
    for each in done:
        answer = each.answer
        after_s = silence_s if answer.status else 0.0
        excused = any(each.began <= out.back + after_s and out.killed <= each.ended for out in outages)
        told = answer.error and not answer.error.startswith("TimeoutError")
        if not answer.ok and not (excused and told):
            outs = ", ".join(f"{out.killed - each.began:.1f} to {out.back - each.began:.1f} s" for out in outages)
            found.append(f"HTTP {answer.status} after {each.ended - each.began:.1f} s, outages {outs}: {answer.error}")
    return found


def judged(results: Results, engine: str, soak: Soak, done: Sequence[Served[Answer]], wanted: Sequence[Answer]) -> None:
    """Keep the row of a soak. Fails at a wrong token, and at a request without an answer that was not told why."""
    failed = [each for each in done if not each.answer.ok]
    kills, downtime_s = len(soak.outages), sum(out.back - out.killed for out in soak.outages)
    took_s = max(each.ended for each in done) - min(each.began for each in done)
    alone = sum(not each.answer.status for each in failed)
    said = f"{kills} kills in {took_s:.0f} s, a half was away for {downtime_s:.0f} s; {alone} met nobody there, "
    said += f"{len(failed) - alone} were told why"
    first, last = soak.footprints
    if SOAK_S:
        said += f"; decode {first} to {last}"
    results.add(engine, "a soak with kills of prefill and decode", wanted, [each.answer for each in done], said)
    assert not unexplained(done, soak.outages, soak.silence_s)
    assert last.rss_bytes < 1.2 * first.rss_bytes
    assert last.descriptors < first.descriptors + 16


def crowded(
    results: Results, engine: str, ask: Callable[[list[int]], Answer], split: Callable[[list[int]], Answer]
) -> None:
    """Ask 500 prompts of a prefill and a decode, 100 at once, and keep the row. Fails at an answer that differs or did
    not come.
    """
    prompts = prompts_of(500, seed=131, least_tokens=20, most_tokens=400)
    wanted, got = many(ask, prompts), many(split, prompts, at_once=100)
    assert results.add(engine, "500 requests, 100 at once", wanted, got).same == len(prompts)
