"""A router names the engine that has a prompt's KV, in Dynamo's words or llm-d's: it is read there, whatever its make.

No engine has a list of others. What a hint names is met when the first request names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.live import sglang_client, vllm_client
from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.cross.test_live_cross_peer_tier import exchanging
from tests.live.server import Command, Server, labelled
from tests.live.sglang import test_live_sglang_peer_tier as sglang_peers
from tests.live.sglang.test_live_sglang_hints import answered
from tests.live.sglang_servers import sglang
from tests.live.table import Results
from tests.live.vllm import test_live_vllm_peer_tier as vllm_peers
from tests.live.vllm.test_live_vllm_hints import Hinted
from tests.live.vllm_servers import vllm

_ALLOWED = {"KVMOVER_EXCHANGE_ALLOW": "127.0.0.1"}

#: A word for the source of a prompt among the parts of a request.
Words = Callable[[str], Mapping[str, Any]]


def dynamo(address: str) -> dict[str, Any]:
    """The envelope of Dynamo's router."""
    payload = {"source_control_endpoint": f"tcp://{address}", "block_hashes": [17, 2**64 - 1], "mode": "copy"}
    action = {"action_id": "fetch", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def llm_d(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"remote_kv_source": {"kv_request_id": "q", "remote_host": host, "remote_port": int(port)}}


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet at `address`. `ranks`: of vLLM, whose ledger is behind their metrics ports."""

    name: str
    server: Server
    make: str
    address: str
    page_tokens: int
    ranks: int = 1

    def ask(self, prompt: Sequence[int], source: str = "", words: Words = dynamo, tokens: int = 16) -> Answer:
        if self.make == "sglang":
            return sglang_client.ask(self.server, prompt, tokens, {"kv_hints": dynamo(source)} if source else None)
        if not source:
            return vllm_client.ask(self.server, prompt, tokens)
        said = {"kv_hint": words(source)} if words is dynamo else words(source)
        return vllm_client.ask(self.server, prompt, tokens, said)

    def hits(self) -> dict[str, float]:
        return vllm_peers.hits(self.server) if self.make == "vllm" else sglang_peers.hits(self.server)

    def lent(self) -> float:
        return self.server.metrics(vllm_peers._LENT)[vllm_peers._LENT] if self.make == "vllm" else 0

    def lends(self, prompts: Sequence[Sequence[int]], before: float) -> None:
        if self.make == "vllm":
            vllm_peers.lent(self.server, int(before) + sum(len(prompt) // self.page_tokens for prompt in prompts))
        else:
            sglang_peers.lendable(self.server, prompts)

    def answers(self, outcome: str) -> float:
        if self.make == "sglang":
            return answered(self.server, "fetch", outcome)
        return Hinted(self.server, self.ranks).answered("fetch", outcome)


def alone(command: Command) -> Command:
    """Without a list of others; requests may name any on this host."""
    return exchanging(replace(command, environment={**command.environment, **_ALLOWED}))


def test_a_source_that_a_router_names_is_read_by_engines_of_either_make_and_any_shape(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, names = model("llama", "sglang"), sglang_peers.addresses(5)
    prompts = [prompts_of(8, seed=seed, least_tokens=150, most_tokens=700) for seed in (211, 212, 213)]
    plain = servers.start(sglang("hints-sglang-plain", weights), vllm("hints-vllm-plain", weights))
    asks = {"sglang": sglang_client.ask, "vllm": vllm_client.ask}
    wanted = {
        make: [many(lambda prompt, ask=asks[make], server=server: ask(server, prompt), each) for each in prompts]
        for make, server in zip(("sglang", "vllm"), plain, strict=True)
    }
    servers.stop(plain)
    started = servers.start(
        alone(sglang_peers.sharing("hints-sglang-tp2", weights, names[0], (), tp=2, page_tokens=16)),
        alone(vllm_peers.lending("hints-vllm-32", weights, names[1], (), "LBHNC", block_tokens=32)),
        alone(sglang_peers.sharing("hints-sglang-tp1", weights, names[2], (), page_tokens=64)),
    )
    fleets = [
        Fleet("SGLang TP2 in pages of 16", started[0], "sglang", names[0], 16),
        Fleet("vLLM in blocks of 32", started[1], "vllm", names[1], 32),
        Fleet("SGLang TP1 in pages of 64", started[2], "sglang", names[2], 64),
    ]
    for number, (lender, asked) in enumerate(zip(fleets, prompts, strict=True)):
        before = lender.lent()
        got = many(lender.ask, asked)
        title = f"hints, {lender.name} computes"
        assert not results.add("sglang and vllm", title, wanted[lender.make][number], got).failed
        lender.lends(asked, before)
        for borrower in fleets:
            if borrower is not lender:
                hinted(borrower, lender, asked, wanted[borrower.make][number], results)
    for borrower in fleets:
        dead(borrower, names[3], wanted, results)
    servers.stop(started)


def hinted(
    borrower: Fleet, lender: Fleet, prompts: Sequence[list[int]], wanted: Sequence[Answer], results: Results
) -> None:
    """All whole pages of both come from the source, but for the page with a prompt's last token."""
    known, met = borrower.hits(), borrower.answers("met")
    got = many(lambda prompt: borrower.ask(prompt, lender.address), prompts)
    found = {source: tokens - known[source] for source, tokens in borrower.hits().items()}
    title = f"hints, {lender.name} is named to {borrower.name}"
    assert not results.add("sglang and vllm", title, wanted, got, vllm_peers.said_of(found)).failed
    has, asks = lender.page_tokens, borrower.page_tokens
    assert found["peer"] >= sum((len(prompt) - 1) // has * has // asks * asks for prompt in prompts)
    assert sum(found.values()) == sum(map(len, prompts))
    assert borrower.answers("met") == met + len(prompts)


def dead(borrower: Fleet, address: str, wanted: Mapping[str, Sequence[Sequence[Answer]]], results: Results) -> None:
    """Prompts that nobody has and whose source does not answer, or may not be dialled, are computed."""
    prompts = prompts_of(4, seed=214 + borrower.page_tokens, least_tokens=300, most_tokens=400)
    known = borrower.hits()
    gone = [borrower.ask(prompt, address) for prompt in prompts[:2]]
    away = [borrower.ask(prompt, "192.0.2.7:8400") for prompt in prompts[2:]]
    assert all(each.ok for each in (*gone, *away))
    found = {source: tokens - known[source] for source, tokens in borrower.hits().items()}
    assert (found["peer"], found["computed"]) == (0, sum(map(len, prompts)))
    assert (borrower.answers("unreachable"), borrower.answers("not_allowed")) == (2, 2)


def test_vllm_of_another_tp_and_block_size_reads_a_source_that_llm_d_names(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    """TP2 in blocks of 16 computes, TP1 in blocks of 64 is told by the sidecar's words, and the other way."""
    weights, names = model("qwen3", "vllm"), sglang_peers.addresses(2)
    plain, *started = servers.start(
        vllm("hints-vllm-plain-2", weights),
        alone(vllm_peers.lending("hints-vllm-tp2-16", weights, names[0], (), "LBNHC", tp=2, block_tokens=16)),
        alone(vllm_peers.lending("hints-vllm-tp1-64", weights, names[1], (), "LBHNC", block_tokens=64)),
    )
    first = Fleet("TP2 in blocks of 16", started[0], "vllm", names[0], 16, ranks=2)
    second = Fleet("TP1 in blocks of 64", started[1], "vllm", names[1], 64)
    vllm_client.warm(plain, *started)
    for lender, borrower, seed in ((first, second, 221), (second, first, 222)):
        prompts = prompts_of(12, seed=seed, least_tokens=150, most_tokens=700)
        wanted = many(lambda prompt: vllm_client.ask(plain, prompt), prompts)
        before = lender.lent()
        many(lender.ask, prompts)
        lender.lends(prompts, before)
        told_by_a_sidecar(borrower, lender, prompts, wanted, results)
    servers.stop([plain, *started])


def told_by_a_sidecar(
    borrower: Fleet, lender: Fleet, prompts: Sequence[list[int]], wanted: Sequence[Answer], results: Results
) -> None:
    known, met = borrower.hits(), borrower.answers("met")
    read = labelled(borrower.server, "vllm:kvmover_peer_loads_total", "read")
    got = many(lambda prompt: borrower.ask(prompt, lender.address, llm_d), prompts)
    found = {source: tokens - known[source] for source, tokens in borrower.hits().items()}
    title = f"hints of llm-d, {lender.name} is named to {borrower.name}"
    assert not results.add("vllm", title, wanted, got, vllm_peers.said_of(found)).failed
    asks = borrower.page_tokens
    assert found["peer"] >= sum((len(prompt) // 64 * 64 - 1) // asks * asks for prompt in prompts)
    assert labelled(borrower.server, "vllm:kvmover_peer_loads_total", "read") > read
    assert borrower.answers("met") == met + len(prompts)
