"""Servers of unlike make as prefill and decode, behind the router of docs/examples, and what they are asked."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

from tests.live.answers import Answer, post
from tests.live.server import ROOT, Command, Server, free_port
from tests.live.sglang_servers import sglang
from tests.live.vllm_servers import kvmover, vllm

_ROUTER = ROOT / "docs" / "examples" / "exchange" / "router.py"

#: What both engines call the model.
EXCHANGE = {"KVMOVER_EXCHANGE_MODEL": "tiny"}


def exchanging_sglang(name: str, model: Path, mode: tuple[str, ...], *more: str, **how: Any) -> Command:
    """SGLang as prefill or decode of a request whose other half may be another engine."""
    return sglang(name, model, *more, mode=mode, environment=EXCHANGE, **how)


def exchanging_vllm(
    name: str, model: Path, *more: str, root: Path | None = None, layout: str = "", **how: Any
) -> Command:
    """vLLM likewise, whose ranks are found at the bootstrap port of the command. `root`: of a page store."""
    port = free_port()
    options = {"port": port} | ({"root": str(root)} if root else {})
    environment = EXCHANGE | ({"VLLM_KV_CACHE_LAYOUT": layout} if layout else {})
    return replace(vllm(name, model, *more, kv=kvmover(**options), environment=environment, **how), bootstrap_port=port)


@dataclass(frozen=True, slots=True)
class Front:
    """Where a router answers."""

    url: str


@contextmanager
def routed(prefill: Server, decode: Server) -> Iterator[Front]:
    """The router of the docs in front of two servers, while the block runs."""
    example = runpy.run_path(str(_ROUTER))
    with ThreadPoolExecutor(64) as pool:
        ranks = "127.0.0.1", prefill.command.bootstrap_port
        router = example["Router"]((prefill.engine, prefill.url), (decode.engine, decode.url), ranks, pool)
        front = example["serve"](router, 0)
        Thread(target=front.serve_forever, daemon=True, name="router").start()
        try:
            yield Front(f"http://127.0.0.1:{front.server_address[1]}")
        finally:
            front.shutdown()
            front.server_close()


def ask(server: Server | Front, prompt: Sequence[int], tokens: int = 16, timeout_s: float = 120.0) -> Answer:
    """Greedy tokens and their log probabilities, by OpenAI's completions, which both engines and the router speak."""
    payload = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    reply = post(f"{server.url}/v1/completions", payload, timeout_s)
    if reply.status != 200:
        return Answer(reply.status, reply.seconds, error=reply.error)
    choice = reply.body["choices"][0]
    return Answer(200, reply.seconds, tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))


def received_bytes(decode: Server, make: str, ranks: int) -> float:
    """The bytes of KV that all ranks of a decode have received, by their own metrics."""
    if make == "vllm":
        return decode.metrics("vllm:kvmover_received_bytes")["vllm:kvmover_received_bytes_total"]
    name, port = "kvmover_received_bytes_total", int(decode.command.environment["KVMOVER_METRICS_PORT"])
    return sum(decode.metrics(name, port=port + rank)[name] for rank in range(ranks))
