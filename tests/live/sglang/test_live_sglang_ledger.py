"""Where SGLang's hit tokens went: metrics say what SGLang says, and who subscribes late knows what is cached."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvmover.cache.prefix.event_history import END_OF_REPLAY
from kvmover.cache.prefix.hashes import as_int64s, chain
from kvmover.tools.scrape import Scrape
from tests.live.answers import Answer, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import free_port
from tests.live.sglang_client import ask, usage, warm
from tests.live.sglang_servers import sglang

#: Batches of KV events that the publisher keeps: fewer than requests.
_KEPT = 8

_PAGE = 16


def late_subscriber(zmq: Any, port: int) -> set[int]:
    """Names of pages that one believes to be cached that comes now and asks for all batches."""
    context, known = zmq.Context(), set[int]()
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVTIMEO, 20_000)
    asking.connect(f"tcp://127.0.0.1:{port}")
    asking.send_multipart((b"", bytes(8)))
    while (frames := asking.recv_multipart())[2] != END_OF_REPLAY:
        for event in msgspec.msgpack.decode(frames[3])[1]:
            if event["type"] == "AllBlocksCleared":
                known.clear()
            elif event["type"] == "BlockStored":
                known.update(event["block_hashes"])
            else:
                known.difference_update(event["block_hashes"])
    context.destroy(linger=0)
    return known


def predicted(tokens: int, tenant: str) -> dict[str, Any]:
    """What a router says with a request."""
    custom = {"kvmover_predicted_tokens": tokens, "kvmover_tenant": tenant}
    return {"sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "custom_params": custom}}


def test_metrics_say_what_sglang_says_and_late_subscribers_know_the_cache(servers: Servers, model: ModelMaker) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    metrics, live, again = free_port(), free_port(), free_port()
    events = {"publisher": "kvmover", "endpoint": f"tcp://*:{live}", "replay_endpoint": f"tcp://*:{again}"}
    (server,) = servers.start(
        sglang(
            "sglang-ledger",
            model("llama", "sglang"),
            *("--radix-cache-backend", "kvmover"),
            *("--kv-events-config", json.dumps({**events, "buffer_steps": _KEPT})),
            environment={"KVMOVER_METRICS_PORT": str(metrics)},
        )
    )
    warm(server)
    before = Scrape.of(server.get("/metrics", metrics)[1], 0.0)
    prompts = prompts_of(20, seed=17, least_tokens=40, most_tokens=200, shared_tokens=100)
    answers: list[Answer] = []
    for number, prompt in enumerate(prompts):
        room = predicted(96, "gold") if number % 2 else None
        answers.append(ask(server, prompt, 4, room))
        assert answers[-1].ok, answers[-1].error
    hits, asked = sum(answer.cached_tokens for answer in answers), sum(map(len, prompts))
    gold = sum(map(len, prompts[1::2]))
    assert usage(server) == 0

    now = Scrape.of(server.get("/metrics", metrics)[1], 0.0)
    for source, tokens in (("device", hits), ("computed", asked - hits)):
        name = "kvmover_prompt_tokens_total"
        assert now.total(name, source=source) - before.total(name, source=source) == tokens
    assert now.total("kvmover_prompt_tokens_total", tenant="gold") == gold
    delivered = sum(answer.cached_tokens for answer in answers[1::2])
    said = now.by("kvmover_predicted_tokens_total", "outcome", by="router")
    assert said["foreseen"] + said["missed"] == 10 * 96
    assert said["foreseen"] + said["unforeseen"] == delivered
    assert now.total("kvmover_ledger_faults_total") == 0

    known = late_subscriber(zmq, again)
    for prompt in prompts:
        assert set(as_int64s(chain(b"", prompt, _PAGE))) <= known
    servers.stop([server])
