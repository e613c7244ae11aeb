"""`kvmover check` on live pairs of vLLM: it counts the bytes of a good one, and names the half of a bad one."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.live.checkpoints import other_weights
from tests.live.checks import checked
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port
from tests.live.table import Results
from tests.live.vllm_client import warm
from tests.live.vllm_servers import kvmover, router, vllm

#: Hosts of nobody (RFC 5737): a decode that may dial these alone finds no prefill.
_NOBODY = "192.0.2.0/24"


def test_a_check_of_a_good_pair_tells_bytes_route_and_tokens(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, ports = model("qwen3", "vllm"), [free_port(), free_port()]
    own, other = ({"KVMOVER_METRICS_PORT": str(port)} for port in ports)
    first, second = servers.start(
        vllm("vllm-check-prefill", weights, kv=kvmover(), environment=own),
        vllm("vllm-check-decode", weights, kv=kvmover(), block_tokens=64, environment=other),
    )
    warm(first, second)
    endpoints = [word for port in ports for word in ("--metrics", f"127.0.0.1:{port}/metrics")]
    found = checked(results, "vllm", "a prefill and a decode", (first, second, *endpoints))
    # 4 layers of 4 heads of K and V of 32 float32 are 4,096 bytes a token.
    assert found["received_bytes"] == 4096 * found["prefill"]["prompt_tokens"]
    assert found["route"]
    assert found["equal_tokens"] == found["compared_tokens"] == 16
    found = checked(results, "vllm", "without metrics of kvmover", (first, second))
    assert (found["route"], found["equal_tokens"]) == ("", 16)
    (front,) = servers.start(router("vllm-check-router", first, second))
    assert checked(results, "vllm", "through the router", (first, second, front))["equal_tokens"] == 16
    words = (first, second, "http://127.0.0.1:9")
    checked(results, "vllm", "a router that is down", words, "request_failed", "router")


def test_a_check_of_a_bad_pair_names_the_half_that_is_at_fault(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, key = model("qwen3", "vllm"), tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    port = free_port()
    elsewhere = {"KVMOVER_EXCHANGE_ALLOW": _NOBODY, "KVMOVER_METRICS_PORT": str(port)}
    first, second, taker, giver, shut = servers.start(
        vllm("vllm-check-first", weights, kv=kvmover()),
        vllm("vllm-check-second", weights, kv=kvmover()),
        vllm("vllm-check-taker", weights, kv=kvmover(role="kv_consumer")),
        vllm("vllm-check-giver", weights, kv=kvmover(role="kv_producer")),
        vllm("vllm-check-shut", weights, kv=kvmover(), environment=elsewhere),
    )
    warm(plain.ready(), first, second, taker, giver, shut)
    bad: list[tuple[str, tuple[str | Server, ...], str, str]] = [
        ("a prefill that is down", ("http://127.0.0.1:9", second), "server_down", "prefill"),
        ("a decode without kvmover", (first, plain), "no_connector", "decode"),
        ("a prefill without kvmover", (plain, second), "no_connector", "prefill"),
        ("a prefill that gives nothing", (taker, second), "wrong_role", "prefill"),
        ("a decode that takes nothing", (first, giver), "recomputed", "decode"),
        (
            "a decode that cannot reach the prefill",
            (first, shut, "--metrics", f"127.0.0.1:{port}/metrics"),
            "unreachable",
            "decode",
        ),
    ]
    for what, pair, outcome, half in bad:
        checked(results, "vllm", what, pair, outcome, half)
    servers.stop([second, taker, giver, shut])
    others = servers.start(
        vllm("vllm-check-other", other_weights(weights, tmp_path / "other"), kv=kvmover()),
        vllm("vllm-check-keyed", weights, kv=kvmover(), environment={"KVMOVER_SECURITY_SHARED_KEY_FILE": str(key)}),
    )
    warm(*others)
    for what, decode, told in zip(
        ("a decode of other weights", "a decode with a key"),
        others,
        ("they differ in weights", "this side's card is sealed with a shared key"),
        strict=True,
    ):
        assert told in checked(results, "vllm", what, (first, decode), "refused", "both")["sentence"]
