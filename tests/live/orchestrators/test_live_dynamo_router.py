"""Dynamo's router names the worker that has a prompt's KV on its host, and a worker of another shape reads it there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.orchestrators.dynamo_servers import NIXL, VLLM, Dynamo
from tests.live.orchestrators.orchestrated import DYNAMOS_TOKEN_IDS, TOKEN_BYTES, Way, ask, until_served
from tests.live.server import Command, Server, free_port
from tests.live.table import Results
from tests.live.vllm.test_live_vllm_hints import Hinted
from tests.live.vllm.test_live_vllm_peer_tier import lent, read
from tests.live.vllm_servers import DRAINED, OFFLOADING, sharing

#: The router counts in blocks of one size, of whatever worker.
_BLOCK_TOKENS = 32

#: It counts what a worker has, which it else would not ask for, and goes by load.
_ROUTER = ("--router-kv-overlap-score-credit", "0.01", "--router-host-cache-hit-weight", "0.01")


def _with(command: Command, *options: str) -> Command:
    return replace(command, arguments=[*command.arguments, *options])


def hinted(dynamo: Dynamo, name: str, model: Path, layout: str, tp: int) -> Command:
    """Returns the command of a worker that lends what is on its host, and tells Dynamo where."""
    kv = sharing("", ())
    (tier,) = kv["kv_connector_extra_config"]["secondary_tiers"]
    del tier["address"], tier["engines"]
    tier |= {"router_capabilities": ["router_hint"], "control_advertise_host": "127.0.0.1"}
    tier |= {"control_ports": [free_port()]}
    events = {"publisher": "zmq", "topic": "kv-events", "endpoint": f"tcp://*:{free_port()}"}
    environment = {
        **OFFLOADING,
        "VLLM_KV_CACHE_LAYOUT": layout,
        "KVMOVER_METRICS_PORT": str(free_port()),
        "KVMOVER_PEERS_ASK_S": "5",
        "KVMOVER_EXCHANGE_ALLOW": "127.0.0.1",
    }
    command = dynamo.vllm(name, model, "agg", kv, tp=tp, block_tokens=_BLOCK_TOKENS, environment=environment)
    return _with(command, *DRAINED, "--kv-events-config", json.dumps({**events, "enable_kv_cache_events": True}))


def _hints_met(worker: Server, tp: int) -> float:
    return Hinted(worker, tp).answered("fetch", "met")


def test_a_worker_reads_what_another_of_unlike_shape_has_where_dynamos_router_says(
    servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """No worker has a list of others. The same prompts come again, until load has sent some to the other worker."""
    dynamo, weights = Dynamo(tmp_path / "found", tmp_path / "run.jsonl"), model("llama", "sglang")
    front = dynamo.frontend("dynamo-router-front")
    plain, front, narrow, wide = servers.start(
        dynamo.plain_vllm("dynamo-router-plain", weights),
        _with(front, "--router-mode", "kv", "--kv-cache-block-size", str(_BLOCK_TOKENS), *_ROUTER),
        hinted(dynamo, "dynamo-router-tp1", weights, "LBHNC", 1),
        hinted(dynamo, "dynamo-router-tp2", weights, "LBNHC", 2),
    )
    until_served(front.url, DYNAMOS_TOKEN_IDS)
    way = Way("Dynamo 1.6.1", f"{VLLM}, NIXL {NIXL}", "kv.fetch of its router between workers of TP1 and TP2")
    prompts = way.prompts(least_tokens=200, most_tokens=700)
    wanted = many(lambda prompt: ask(plain.url, prompt), prompts)
    alone = many(lambda prompt: ask(front.url, prompt, DYNAMOS_TOKEN_IDS), prompts)
    assert results.add("orchestrators", f"{way}, computed", wanted, alone).same == len(prompts)
    for worker in (narrow, wide):
        lent(worker, 1)

    got = [many(lambda prompt: ask(front.url, prompt, DYNAMOS_TOKEN_IDS), prompts) for _ in range(3)]
    met, chunks = _hints_met(narrow, 1) + _hints_met(wide, 2), int(read(narrow) + read(wide))
    said = f"{met:.0f} hints met, {chunks * _BLOCK_TOKENS:,} tokens read"
    verdict = results.add("orchestrators", str(way), wanted * 3, [answer for turn in got for answer in turn], said)
    way.keep(verdict, chunks * _BLOCK_TOKENS * TOKEN_BYTES)
    assert verdict.same == 3 * len(prompts), verdict.failed
    assert met > 0
    assert chunks >= met
    assert read(narrow, "failed") == read(wide, "failed") == 0
    servers.stop([plain, front, narrow, wide])
