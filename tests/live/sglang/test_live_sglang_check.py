"""`kvmover check` on live pairs of SGLang: it counts the bytes of a good one, and names the half of a bad one."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.live.checkpoints import other_weights
from tests.live.checks import checked
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port
from tests.live.sglang_client import warm
from tests.live.sglang_servers import DECODE, PREFILL, sglang
from tests.live.table import Results


def _metrics(*servers: Server) -> list[str]:
    ports = [server.command.environment["KVMOVER_METRICS_PORT"] for server in servers]
    return [word for port in ports for word in ("--metrics", f"127.0.0.1:{port}/metrics")]


def test_a_check_of_a_pair_tells_what_came_or_the_half_that_is_at_fault(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, key = model("llama", "sglang"), tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    first, second = servers.start(
        sglang("sglang-check-prefill", weights, mode=PREFILL),
        sglang("sglang-check-decode", weights, mode=DECODE, page_tokens=64),
    )
    warm(plain.ready())
    endpoints = _metrics(first, second)
    found = checked(results, "sglang", "a prefill and a decode", (first, second, *endpoints))
    # 4 layers of 4 heads of K and V of 32 float32 are 4,096 bytes a token.
    assert found["received_bytes"] >= 4096 * (found["prefill"]["prompt_tokens"] - 1)
    assert found["route"]
    assert found["equal_tokens"] == found["compared_tokens"] == 1
    words = (first, second, *endpoints, "--reference", plain)
    assert checked(results, "sglang", "beside a plain server", words)["equal_tokens"] == 16
    checked(results, "sglang", "without metrics", (first, second), "metrics_off", "decode")
    bad: list[tuple[str, tuple[str | Server, ...], str, str]] = [
        ("a decode that is down", (first, "http://127.0.0.1:9"), "server_down", "decode"),
        ("the halves in each other's place", (second, first), "wrong_role", "prefill"),
        ("a decode without a role", (first, plain), "wrong_role", "decode"),
        (
            "a bootstrap port of nobody",
            (first, second, *endpoints, "--bootstrap", f"127.0.0.1:{free_port()}", "--patience", "20"),
            "unreachable",
            "prefill",
        ),
    ]
    for what, words, outcome, half in bad:
        checked(results, "sglang", what, words, outcome, half)
    second.kill()
    servers.running.remove(second)
    others = servers.start(
        sglang("sglang-check-other", other_weights(weights, tmp_path / "other"), mode=DECODE),
        sglang("sglang-check-keyed", weights, mode=DECODE, environment={"KVMOVER_SECURITY_SHARED_KEY_FILE": str(key)}),
    )
    for what, decode, told in zip(
        ("a decode of other weights", "a decode with a key"),
        others,
        ("they differ in weights", "card is sealed, and this side has no shared key"),
        strict=True,
    ):
        words = (first, decode, *_metrics(first, decode))
        assert told in checked(results, "sglang", what, words, "refused", "both")["sentence"]
