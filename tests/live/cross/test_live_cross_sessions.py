"""Sessions go back and forth between engines of unlike shape: a turn finds its prefix where the last was answered.

A router that moves a session says where its KV is. Nothing moves while the session is idle.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from tests.live import sglang_client, vllm_client
from tests.live.answers import Answer
from tests.live.conftest import ModelMaker, Servers
from tests.live.cross.test_live_cross_hints import Fleet, alone
from tests.live.server import Command
from tests.live.sglang import test_live_sglang_peer_tier as sglang_peers
from tests.live.sglang_client import counted
from tests.live.sglang_servers import sglang
from tests.live.table import Results
from tests.live.vllm import test_live_vllm_peer_tier as vllm_peers
from tests.live.vllm_servers import vllm

_SESSIONS, _TURNS, _FIRST_TOKENS, _NEXT_TOKENS = 20, 4, 600, 200

#: By the make of an engine: the shapes that a session is moved between, as their rows call them.
_SHAPES = {
    "sglang": ("SGLang TP2 in pages of 16", "SGLang TP1 in pages of 64"),
    "vllm": ("vLLM TP2 in blocks of 16", "vLLM TP1 in blocks of 64"),
}


def _tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def _command(make: str, name: str, weights: Path, address: str, wide: bool) -> Command:
    tp, size = (2, 16) if wide else (1, 64)
    if make == "sglang":
        return sglang_peers.sharing(name, weights, address, (), tp=tp, page_tokens=size)
    return vllm_peers.lending(name, weights, address, (), "LBNHC" if wide else "LBHNC", tp=tp, block_tokens=size)


def _settled(fleet: Fleet) -> None:
    """Wait until an engine lends all that it is going to lend of the turn that it has answered."""

    def lends() -> float:
        return fleet.lent() if fleet.make == "vllm" else counted(fleet.server, "kvmover_tier_lendable_pages")

    before, stop = -1.0, time.monotonic() + 30
    while (now := lends()) != before:
        assert time.monotonic() < stop, f"{fleet.name} lends more and more: {now}"
        before = now
        time.sleep(0.5)


@pytest.mark.alone
@pytest.mark.parametrize(("one", "other"), [("vllm", "vllm"), ("sglang", "sglang"), ("sglang", "vllm")])
def test_sessions_that_a_router_moves_after_each_turn(
    one: str, other: str, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, names = model("llama", "sglang"), sglang_peers.addresses(2)
    plain, *started = servers.start(
        vllm(f"sessions-{one}-{other}-plain", weights) if other == "vllm" else sglang("sessions-plain", weights),
        alone(_command(one, f"sessions-{one}-{other}-wide", weights, names[0], True)),
        alone(_command(other, f"sessions-{one}-{other}-narrow", weights, names[1], False)),
    )
    client = vllm_client if other == "vllm" else sglang_client
    fleets = [
        Fleet(_SHAPES[one][0], started[0], one, names[0], 16, ranks=2),
        Fleet(_SHAPES[other][1], started[1], other, names[1], 64),
    ]
    histories = [_tokens(number, _FIRST_TOKENS) for number in range(_SESSIONS)]
    wanted, got, moved, computed = list[Answer](), list[Answer](), list[float](), list[float]()
    known = [fleet.hits()["peer"] for fleet in fleets]
    for turn in range(_TURNS):
        here, there = fleets[turn % 2], fleets[1 - turn % 2]
        source = there.address if turn else ""
        for number, history in enumerate(histories):
            if turn:
                history += _tokens(1000 * turn + number, _NEXT_TOKENS)
                cold = here.ask(_tokens(90_000 + 1000 * turn + number, len(history)), tokens=1)
                first = here.ask(history, source, tokens=1)
                moved.append(first.seconds)
                computed.append(cold.seconds)
            wanted.append(client.ask(plain, history))
            got.append(here.ask(history, source))
            history += got[-1].tokens
        _settled(here)
    found = [fleet.hits()["peer"] - before for fleet, before in zip(fleets, known, strict=True)]
    said = f"first token {_ms(moved)} after a move, {_ms(computed)} computed; {sum(found):,.0f} tokens of the other"
    title = f"{_SESSIONS} sessions of {_TURNS} turns, {fleets[0].name} and {fleets[1].name} in turn"
    verdict = results.add("sglang and vllm" if one != other else one, title, wanted, got, said)
    servers.stop([plain, *started])
    assert verdict.same == _SESSIONS * _TURNS, verdict.failed
    assert min(found) >= _SESSIONS * 64, "a block of the coarser engine for each session"


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.0f} ms"
