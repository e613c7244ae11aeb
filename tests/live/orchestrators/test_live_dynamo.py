"""Dynamo's frontend and workers, without etcd and NATS, with kvmover between prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.live.answers import Verdict
from tests.live.conftest import ModelMaker, Servers
from tests.live.orchestrators.dynamo_servers import NIXL, SGLANG, VLLM, Dynamo, patched
from tests.live.orchestrators.orchestrated import DYNAMOS_TOKEN_IDS, REQUESTS, Way, ask, until_served
from tests.live.server import Server, ServerDied
from tests.live.sglang_servers import DECODE, PREFILL
from tests.live.table import Results
from tests.live.vllm_servers import kvmover

_DYNAMO, _VLLM = "Dynamo 1.6.1", f"{VLLM}, NIXL {NIXL}"
_OWN_NAME = kvmover()
#: What Dynamo's table of connectors has a row for, of our module.
_NAME_IN_ITS_TABLE = {**_OWN_NAME, "kv_connector": "NixlConnector"}


@dataclass(frozen=True, slots=True)
class Half:
    """A Dynamo whose decode worker of vLLM runs, beside a plain server: tests bring the prefill."""

    dynamo: Dynamo
    weights: Path
    plain: Server
    front: Server
    decode: Server


@pytest.fixture(scope="module")
def half(servers: Servers, model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Half]:
    folder = tmp_path_factory.mktemp("dynamo")
    dynamo, weights = Dynamo(folder / "found", folder / "run.jsonl"), model("llama", "sglang")
    plain, front, decode = servers.start(
        dynamo.plain_vllm("dynamo-vllm-plain", weights),
        dynamo.frontend("dynamo-vllm-front"),
        dynamo.vllm("dynamo-vllm-decode", weights, "decode", _OWN_NAME),
    )
    yield Half(dynamo, weights, plain, front, decode)
    servers.stop([plain, front, decode])


def test_dynamo_has_no_row_for_our_name(half: Half, servers: Servers) -> None:
    """Where it has one, this test ends, and the docs need neither the other name nor the diff."""
    (prefill,) = servers.start(half.dynamo.vllm("dynamo-vllm-refused", half.weights, "prefill", _OWN_NAME))
    with pytest.raises(AssertionError, match="400"):
        until_served(half.front.url, DYNAMOS_TOKEN_IDS, within_s=10.0)
    answer = ask(half.front.url, range(40), DYNAMOS_TOKEN_IDS)
    seen = next(line for line in prefill.log().splitlines() if line.startswith("ValueError: "))
    way = Way(_DYNAMO, _VLLM, "kv_connector KvmoverConnector")
    way.keep(Verdict(0, (), (answer.error,), 0.0), seen=seen.partition(". ")[0])
    assert answer.status == 400
    assert seen.startswith("ValueError: Unsupported kv_connector='KvmoverConnector' for PD")
    servers.stop([prefill])


def test_answers_of_vllm_under_the_name_that_dynamo_knows(half: Half, servers: Servers, results: Results) -> None:
    kv = _NAME_IN_ITS_TABLE
    (prefill,) = servers.start(half.dynamo.vllm("dynamo-vllm-named", half.weights, "prefill", kv, tp=2))
    until_served(half.front.url, DYNAMOS_TOKEN_IDS)
    way = Way(_DYNAMO, _VLLM, "kv_connector NixlConnector with our module, TP2 to TP1")
    way.compare(results, half.plain.url, half.front.url, half.dynamo.log, DYNAMOS_TOKEN_IDS)
    received = half.decode.metrics("vllm:kvmover_received_requests")["vllm:kvmover_received_requests_total"]
    assert received >= REQUESTS, "Dynamo's own port tells our metrics"
    assert "Creating v1 connector with name: KvmoverConnector" in prefill.log()
    servers.stop([prefill])


def test_answers_of_vllm_with_the_row_of_our_diff(
    half: Half, servers: Servers, results: Results, tmp_path: Path
) -> None:
    folder = patched(tmp_path, "vllm")
    (prefill,) = servers.start(half.dynamo.vllm("dynamo-vllm-diff", half.weights, "prefill", _OWN_NAME, folder))
    until_served(half.front.url, DYNAMOS_TOKEN_IDS)
    way = Way(_DYNAMO, _VLLM, "kv_connector KvmoverConnector with our diff")
    way.compare(results, half.plain.url, half.front.url, half.dynamo.log, DYNAMOS_TOKEN_IDS)
    servers.stop([prefill])


def test_answers_of_sglang(servers: Servers, model: ModelMaker, results: Results, tmp_path: Path) -> None:
    """The prefill is started by the module of the docs, the decode with the diff."""
    dynamo, weights = Dynamo(tmp_path / "found", tmp_path / "run.jsonl"), model("llama", "sglang")
    started = servers.start(
        dynamo.plain_sglang("dynamo-sglang-plain", weights),
        dynamo.frontend("dynamo-sglang-front"),
        dynamo.sglang("dynamo-sglang-prefill", weights, PREFILL),
        dynamo.sglang("dynamo-sglang-decode", weights, DECODE, patched(tmp_path, "sglang"), module="dynamo.sglang"),
    )
    plain, front, *_ = started
    until_served(front.url, DYNAMOS_TOKEN_IDS)
    way = Way(_DYNAMO, str(SGLANG), "plug-ins loaded first")
    way.compare(results, plain.url, front.url, dynamo.log, DYNAMOS_TOKEN_IDS)
    servers.stop(started)


def test_dynamos_worker_of_sglang_reads_its_options_before_any_plug_in(model: ModelMaker, tmp_path: Path) -> None:
    """Where it reads them afterwards, this test ends, and the docs need neither the module nor the diff."""
    dynamo = Dynamo(tmp_path / "found", tmp_path / "run.jsonl")
    command = dynamo.sglang("dynamo-sglang-refused", model("llama", "sglang"), PREFILL, module="dynamo.sglang")
    with pytest.raises(ServerDied, match="invalid choice: 'kvmover'"):
        Server.start(command).ready()
    way = Way(_DYNAMO, str(SGLANG), "-m dynamo.sglang")
    seen = "argument --disaggregation-transfer-backend: invalid choice: 'kvmover'"
    way.keep(Verdict(0, (), ("not started",), 0.0), seen=seen)
