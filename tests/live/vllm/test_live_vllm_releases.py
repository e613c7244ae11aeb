"""Two releases of kvmover between prefill and decode: one lacks the newest message and field of the other."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import ROOT, Command, Ground, Server
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import kvmover, vllm


def of_release(name: str, command: Command) -> Command:
    """The same server, whose movers are of the make-believe release of today, or of the one before it."""
    ground, path = command.ground, os.environ.get("PYTHONPATH", "")
    environment = {**ground.environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}".rstrip(os.pathsep)}
    modules = (*ground.modules, f"tests.live.releases.{name}")
    return replace(command, ground=Ground(ground.engine, modules, environment))


@pytest.mark.parametrize(("prefill", "decode"), [("before", "today"), ("today", "before")])
def test_a_prefill_and_a_decode_of_two_releases_give_a_plain_servers_tokens(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, prefill: str, decode: str
) -> None:
    weights = model("qwen3", "vllm")
    first, second = servers.start(
        of_release(prefill, vllm(f"vllm-prefill-{prefill}", weights, kv=kvmover())),
        of_release(decode, vllm(f"vllm-decode-{decode}", weights, kv=kvmover(), block_tokens=64)),
    )
    warm(plain.ready(), first, second)
    prompts = prompts_of(20, seed=31)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: split(first, second, prompt), prompts)
    row = results.add("vllm", f"prefill of the release {prefill}, decode of {decode}", wanted, got)
    assert not row.failed
    assert row.same == len(prompts)
    assert second.metrics("vllm:kvmover_received_requests")["vllm:kvmover_received_requests_total"] == len(prompts)
    assert usage(first) == usage(second) == 0
    servers.stop((first, second))
