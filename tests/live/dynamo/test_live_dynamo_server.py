"""Dynamo's indexer hears a live SGLang server over kvmover's radix cache, and answers each prompt as its cache does."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.live.answers import prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.dynamo.test_live_dynamo_indexer import HOME, Indexer, indexer, settled
from tests.live.server import free_port
from tests.live.sglang_client import ask, warm
from tests.live.sglang_servers import sglang

__all__ = ["indexer"]

pytestmark = [
    pytest.mark.skipif(not (HOME / ".ready").exists(), reason="needs Dynamo's indexer: `make indexer`"),
    pytest.mark.skipif("sglang" not in os.environ.get("KVMOVER_LIVE", ""), reason="serves with SGLang"),
]

_PAGE, _WORKER, _MODEL = 16, 11, "llama"


def test_an_indexer_answers_every_prompt_as_the_cache_of_a_live_server_does(
    servers: Servers, model: ModelMaker, indexer: Indexer
) -> None:
    """The cache's own answer is `cached_tokens` of a request, which leaves the last token's page to be computed."""
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    live, again = free_port(), free_port()
    events = {"publisher": "kvmover", "endpoint": f"tcp://*:{live}", "replay_endpoint": f"tcp://*:{again}"}
    (server,) = servers.start(
        sglang(
            "dynamo-indexer",
            model("llama", "sglang"),
            *("--radix-cache-backend", "kvmover", "--kv-events-config", json.dumps(events)),
        )
    )
    warm(server)
    where = {"endpoint": f"tcp://127.0.0.1:{live}", "replay_endpoint": f"tcp://127.0.0.1:{again}"}
    indexer.ask("/register", {"instance_id": _WORKER, "model_name": _MODEL, "block_size": _PAGE, **where})

    def heard(tokens: list[int]) -> int:
        said = indexer.ask("/query", {"token_ids": tokens, "model_name": _MODEL})
        return said["instances"].get(str(_WORKER), {}).get("gpu", 0)

    prompts = prompts_of(20, seed=41, least_tokens=40, most_tokens=200, shared_tokens=100)
    others = [[*prompt[: 24 * (number % 4)], *prompt[::-1]] for number, prompt in enumerate(prompts)]
    found = list[int]()
    for prompt in [*prompts, *others, *prompts]:
        known, whole = heard(prompt), len(prompt) // _PAGE * _PAGE
        found.append(ask(server, prompt, 4).cached_tokens)
        assert found[-1] == min(known, (len(prompt) - 1) // _PAGE * _PAGE)
        assert settled(lambda prompt=prompt: heard(prompt), whole) == whole
    assert found[0] == 0 < min(found[-len(prompts) :])
    while server.get("/flush_cache")[0] != 200:
        time.sleep(0.1)
    assert settled(lambda: max(map(heard, prompts)), 0) == 0
    servers.stop([server])
