"""`kvmover check` over HTTP: servers of the tests speak as engines do, and hear what a router would send."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from kvmover import cli
from kvmover.engines.common import CardServer
from kvmover.layout import Component
from kvmover.tools.check.check_command import CheckError, CheckOptions, host_and_port, run_check
from kvmover.tools.check.engine_client import CallFailed, HttpCall, error_in
from kvmover.tools.check.pair_verdict import CheckOutcome
from kvmover.transfer.protocol.handshake import Card, Model

TOKENS = list(range(40, 56))

#: A path's answer to a body, as status and text; a GET has no body.
Path = Callable[[Mapping[str, Any] | None], tuple[int, str]]


@dataclass
class Fake:
    """A server with these paths. `heard`: the bodies of each."""

    paths: dict[str, Path]
    heard: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    url: str = ""

    def serve(self, stack: ExitStack) -> Fake:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, body: Mapping[str, Any] | None) -> None:
                fake.heard.setdefault(self.path, []).append(body or {})
                status, text = fake.paths.get(self.path, lambda _: (404, '{"detail": "Not Found"}'))(body)
                self.send_response(status)
                self.end_headers()
                with suppress(BrokenPipeError):  # a client that has hung up
                    self.wfile.write(text.encode())

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, format: str, *args: object) -> None:
                """Write nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_port}"
        return self


def said(value: object) -> Path:
    return lambda _: (200, json.dumps(value))


class Counts:
    """The counters of a decode, which its answers raise."""

    def __init__(self) -> None:
        self.received_bytes, self.failures = 0, 0

    def engine(self, _: Mapping[str, Any] | None) -> tuple[int, str]:
        lines = [
            "# TYPE vllm:kvmover_received_bytes counter",
            f"vllm:kvmover_received_bytes_total {self.received_bytes}",
        ]
        lines += ["# TYPE vllm:kvmover_received_failures counter"]
        return 200, "\n".join([*lines, f"vllm:kvmover_received_failures_total {self.failures}", ""])

    def ranks(self, _: Mapping[str, Any] | None) -> tuple[int, str]:
        lines = ["# TYPE kvmover_received_bytes counter", f"kvmover_received_bytes_total {self.received_bytes}"]
        lines += ["# TYPE kvmover_posted_chunks counter"]
        lines += [f'kvmover_posted_chunks_total{{route="direct"}} {int(self.received_bytes > 0)}']
        return 200, "\n".join([*lines, ""])


def vllm(counts: Counts, complete: Path) -> Fake:
    """A vLLM server whose completions `complete` gives."""
    return Fake(
        {
            "/v1/models": said({"data": [{"id": "tiny"}]}),
            "/version": said({"version": "0.33.0"}),
            "/metrics": counts.engine,
            "/tokenize": said({"tokens": [1, 2, 3]}),
            "/v1/completions": complete,
        }
    )


def completion(tokens: list[int], params: Mapping[str, Any] | None = None) -> tuple[int, str]:
    best = [{"a": -0.5, "b": -3.0}] * len(tokens)
    choice = {"token_ids": tokens, "logprobs": {"top_logprobs": best}}
    return 200, json.dumps({"choices": [choice], "kv_transfer_params": params})


def sglang(mode: str, generate: Path, bootstrap_port: int = 0) -> Fake:
    info = {"disaggregation_mode": mode, "disaggregation_transfer_backend": "kvmover"}
    return Fake(
        {
            "/v1/models": said({"data": [{"id": "tiny"}]}),
            "/server_info": said({**info, "disaggregation_bootstrap_port": bootstrap_port}),
            "/generate": generate,
        }
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def cards(stack: ExitStack, weights: str = "a") -> CardServer:
    """A port where a rank with these weights is found."""
    model = Model("tiny", (Component.attention(2, 2, 64, "bfloat16"),), weights)
    server = CardServer("127.0.0.1", 0)
    server.lay_out("engine", [msgspec.msgpack.encode(Card((1, 1), model.fields(), model.text(), b""))])
    stack.callback(server.close)
    return server


def offered(port: int) -> dict[str, Any]:
    where = {"remote_host": "127.0.0.1", "remote_port": port, "remote_engine_id": "e", "remote_request_id": "r"}
    return {"do_remote_prefill": True, "kvmover_content": "3:00", **where}


def prefill_of(port: int) -> Path:
    """A prefill that offers its KV, and answers alone as well."""

    def complete(body: Mapping[str, Any] | None) -> tuple[int, str]:
        assert body is not None
        for_another = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        return completion([40], offered(port)) if for_another else completion(TOKENS)

    return complete


def test_two_vllm_servers_are_asked_as_a_router_asks_and_their_counters_are_read(stack: ExitStack) -> None:
    counts, port = Counts(), cards(stack).port

    def decode(body: Mapping[str, Any] | None) -> tuple[int, str]:
        counts.received_bytes += 4096
        return completion(TOKENS)

    first = vllm(Counts(), prefill_of(port)).serve(stack)
    second = vllm(counts, decode).serve(stack)
    second.paths["/ranks"] = counts.ranks
    _, found = run_check(CheckOptions([first.url, second.url], [f"{second.url}/ranks"]))
    assert (found.outcome, found.received_bytes, found.route) == (CheckOutcome.MOVED, 4096, "direct")
    assert (found.equal_tokens, found.compared_tokens) == (16, 16)
    half, alone = first.heard["/v1/completions"]
    assert half["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (half["max_tokens"], half["model"]) == (1, "tiny")
    assert "kv_transfer_params" not in alone
    (whole,) = second.heard["/v1/completions"]
    assert whole["kv_transfer_params"] == offered(port)
    assert whole["prompt"] == half["prompt"] == alone["prompt"]


def test_the_cards_of_two_vllm_servers_tell_why_they_refuse_each_other(stack: ExitStack) -> None:
    counts, ports = Counts(), [cards(stack, "a").port, cards(stack, "b").port]

    def decode(body: Mapping[str, Any] | None) -> tuple[int, str]:
        assert body is not None
        if body["kv_transfer_params"].get("do_remote_decode"):
            return completion([40], offered(ports[1]))
        counts.failures += 1
        return completion(TOKENS)

    first, second = vllm(Counts(), prefill_of(ports[0])).serve(stack), vllm(counts, decode).serve(stack)
    _, found = run_check(CheckOptions([first.url, second.url]))
    assert found.outcome is CheckOutcome.REFUSED
    assert "peer holds weights a of tiny" in found.sentence
    assert "they differ in weights" in found.sentence


def test_a_prefill_whose_ranks_are_nowhere_is_at_fault(stack: ExitStack) -> None:
    counts = Counts()

    def decode(body: Mapping[str, Any] | None) -> tuple[int, str]:
        counts.failures += 1
        return completion(TOKENS)

    first, second = vllm(Counts(), prefill_of(9)).serve(stack), vllm(counts, decode).serve(stack)
    _, found = run_check(CheckOptions([first.url, second.url]))
    assert (found.outcome, found.half) == (CheckOutcome.UNREACHABLE, "prefill")
    assert "no cards from 127.0.0.1:9" in found.sentence


def test_two_sglang_servers_get_one_room_at_once_and_a_prefill_left_alone_is_hung_up_on(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmover.tools.check.check_command._LEFT_S", 0.2)
    monkeypatch.setattr("kvmover.tools.check.check_command._SETTLE_S", 0.2)
    both, over = threading.Barrier(2, timeout=30), threading.Event()
    refused = "KVTransferError(bootstrap_room=7): peer holds weights a of tiny; this side holds b"

    def prefill(body: Mapping[str, Any] | None) -> tuple[int, str]:
        both.wait()
        over.wait(30)
        return 200, "{}"

    def decode(body: Mapping[str, Any] | None) -> tuple[int, str]:
        both.wait()
        return 500, json.dumps({"error": {"message": refused}})

    first = sglang("prefill", prefill, cards(stack).port).serve(stack)
    second = sglang("decode", decode).serve(stack)
    stack.callback(over.set)
    seen, found = run_check(CheckOptions([first.url, second.url]))
    assert (found.outcome, found.half) == (CheckOutcome.REFUSED, "both")
    assert found.sentence == "the halves refuse each other: HTTP 500 peer holds weights a of tiny; this side holds b"
    (one,), (other,) = first.heard["/generate"], second.heard["/generate"]
    names = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "text")
    assert [one[name] for name in names] == [other[name] for name in names]
    assert seen.ranks.address == f"127.0.0.1:{one['bootstrap_port']}"


def test_a_router_is_asked_once_the_pair_is_good(stack: ExitStack) -> None:
    counts, port = Counts(), cards(stack).port

    def decode(body: Mapping[str, Any] | None) -> tuple[int, str]:
        counts.received_bytes += 4096
        return completion(TOKENS)

    first, second = vllm(Counts(), prefill_of(port)).serve(stack), vllm(counts, decode).serve(stack)
    router = Fake({"/v1/completions": lambda _: completion(TOKENS)}).serve(stack)
    _, found = run_check(CheckOptions([first.url, second.url, router.url]))
    assert (found.outcome, found.half) == (CheckOutcome.RECOMPUTED, "router")
    (asked,) = router.heard["/v1/completions"]
    assert asked["prompt"] not in [each["prompt"] for each in first.heard["/v1/completions"]]


def test_the_command_prints_a_verdict_or_json_and_ends_with_its_status(
    stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    half = Fake({"/version": said({"version": "0.33.0"}), "/metrics": lambda _: (200, "vllm:x 1\n")}).serve(stack)
    with pytest.raises(SystemExit) as end:
        cli.main(["check", "--json", half.url, "http://127.0.0.1:9"])
    data = json.loads(capsys.readouterr().out)
    assert (end.value.code, data["outcome"], data["half"], data["status"]) == (1, "server_down", "decode", 1)
    assert (data["prefill"]["make"], data["prefill"]["mover"]) == ("vllm", "")
    with pytest.raises(SystemExit) as end:
        cli.main(["check", half.url, half.url])
    assert end.value.code == 1
    assert f"prefill {half.url} has no connector of kvmover" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["http://a"], "1 URLs; a check takes a prefill, a decode"),
        (["http://a", "http://b", "http://c", "http://d"], "4 URLs"),
        (["http://a", "http://b", "--bootstrap", "p"], "p is not HOST:PORT"),
        (["http://a", "http://b", "--metrics", "p:24402-24400"], "a range goes from a port up"),
        (["http://a", "http://b", "--patience", "0"], "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_are_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["check", *words])
    told = capsys.readouterr()
    assert (end.value.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert named in told.err


def test_an_address_that_is_none_is_a_server_that_does_not_answer() -> None:
    with pytest.raises(CallFailed, match="is no address of a server"):
        HttpCall("http://a:port", 1.0)
    with pytest.raises(CheckError, match="is not HOST:PORT"):
        host_and_port("8998")


def test_the_sentence_of_an_error_is_found_wherever_a_server_puts_it() -> None:
    assert error_in('{"error": {"message": "a\\nb"}}') == "a b"
    assert error_in('{"detail": "no"}') == "no"
    assert error_in("<html>") == "<html>"
    assert len(error_in("x" * 9999)) == 400
