"""Requests to vLLM go on while the halves are killed and come back: no wrong token, and who gets none is told why."""

from __future__ import annotations

import pytest

from tests.live.answers import many
from tests.live.conftest import SOAK_S, ModelMaker, Servers
from tests.live.server import Command, Server
from tests.live.soak import Soak, crowded, judged
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import kvmover, vllm

#: A source keeps blocks for so long that nobody asks for, and a peer that answers no ping for so long is lost.
_DEADLINE_S, _SILENCE_S = 10, 3

_ENVIRONMENT = {"KVMOVER_MOVER_PING_S": "0.5", "KVMOVER_MOVER_SILENCE_S": str(_SILENCE_S)}


def _halves(name: str, model: ModelMaker) -> tuple[Command, Command]:
    weights, kv = model("qwen3", "vllm"), kvmover(deadline_s=_DEADLINE_S)
    return (
        vllm(f"{name}-prefill", weights, kv=kv, environment=_ENVIRONMENT),
        vllm(f"{name}-decode", weights, kv=kv, block_tokens=32, environment=_ENVIRONMENT),
    )


def test_requests_go_on_while_halves_are_killed_and_come_back(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    first, second = servers.start(*_halves("vllm-soak", model))
    warm(plain.ready(), first, second)
    soak = Soak(servers, first, second, lambda one, other, prompt, s: split(one, other, prompt, 16, s), _SILENCE_S)
    done = soak.run(seed=130)
    judged(results, "vllm", soak, done, many(lambda each: ask(plain, each.prompt), done))
    assert usage(soak.prefill, _DEADLINE_S + 10) == usage(soak.decode, _DEADLINE_S + 10) == 0
    servers.stop([soak.prefill, soak.decode])


@pytest.mark.skipif(not SOAK_S, reason="`make soak` runs it")
def test_five_hundred_requests_with_a_hundred_at_once(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    first, second = servers.start(*_halves("vllm-crowd", model))
    warm(plain.ready(), first, second)
    crowded(results, "vllm", lambda prompt: ask(plain, prompt), lambda prompt: split(first, second, prompt))
    assert usage(first, _DEADLINE_S + 10) == usage(second, _DEADLINE_S + 10) == 0
