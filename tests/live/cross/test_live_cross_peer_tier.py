"""Three fleets of two engines share what they have on their hosts: what one has computed the others read there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import EXCHANGE, ask
from tests.live.server import Command, Server
from tests.live.sglang import test_live_sglang_peer_tier as sglang_peers
from tests.live.sglang_servers import sglang
from tests.live.table import Results
from tests.live.vllm import test_live_vllm_peer_tier as vllm_peers
from tests.live.vllm_servers import vllm


@dataclass(frozen=True, slots=True)
class Fleet:
    """`own`: what the same engine answers by itself."""

    name: str
    server: Server
    page_tokens: int
    own: str

    def lends(self, prompts: Sequence[Sequence[int]], before: float) -> None:
        """Wait until all whole pages of these may be read here."""
        if self.own == "vllm":
            vllm_peers.lent(self.server, int(before) + sum(len(prompt) // self.page_tokens for prompt in prompts))
        else:
            sglang_peers.lendable(self.server, prompts)

    def lent(self) -> float:
        return self.server.metrics(vllm_peers._LENT)[vllm_peers._LENT] if self.own == "vllm" else 0

    def hits(self) -> dict[str, float]:
        return vllm_peers.hits(self.server) if self.own == "vllm" else sglang_peers.hits(self.server)


def exchanging(command: Command) -> Command:
    return replace(command, environment={**command.environment, **EXCHANGE})


def test_three_fleets_of_two_engines_read_each_others_host_memory(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, names = model("llama", "sglang"), sglang_peers.addresses(3)
    prompts = [prompts_of(10, seed=seed, least_tokens=150, most_tokens=700) for seed in (201, 202, 203)]
    plain = servers.start(sglang("cross-peers-sglang-plain", weights), vllm("cross-peers-vllm-plain", weights))
    wanted = {
        own: [many(lambda prompt, server=server: ask(server, prompt), each) for each in prompts]
        for own, server in zip(("sglang", "vllm"), plain, strict=True)
    }
    servers.stop(plain)
    started = servers.start(
        exchanging(sglang_peers.sharing("cross-peers-sglang-tp2", weights, names[0], names, tp=2, page_tokens=16)),
        exchanging(sglang_peers.sharing("cross-peers-sglang-tp1", weights, names[1], names, page_tokens=64)),
        exchanging(vllm_peers.lending("cross-peers-vllm", weights, names[2], names, "LBHNC", block_tokens=32)),
    )
    fleets = [
        Fleet("SGLang TP2 in pages of 16", started[0], 16, "sglang"),
        Fleet("SGLang TP1 in pages of 64", started[1], 64, "sglang"),
        Fleet("vLLM in blocks of 32", started[2], 32, "vllm"),
    ]
    for number, (lender, asked) in enumerate(zip(fleets, prompts, strict=True)):
        before = lender.lent()
        alone = many(lambda prompt, lender=lender: ask(lender.server, prompt), asked)
        title = f"host memory of three fleets, {lender.name}, computed"
        assert not results.add("sglang and vllm", title, wanted[lender.own][number], alone).failed
        lender.lends(asked, before)
        for borrower in fleets:
            if borrower is not lender:
                reads(borrower, lender, asked, wanted[borrower.own][number], results)
    servers.stop(started)


def reads(
    borrower: Fleet, lender: Fleet, prompts: Sequence[list[int]], wanted: Sequence[Answer], results: Results
) -> None:
    """All that is in whole pages of both, but for the page with a prompt's last token."""
    known = borrower.hits()
    got = many(lambda prompt: ask(borrower.server, prompt), prompts)
    found = {source: tokens - known[source] for source, tokens in borrower.hits().items()}
    title = f"host memory of three fleets, {lender.name} to {borrower.name}"
    assert not results.add("sglang and vllm", title, wanted, got, vllm_peers.said_of(found)).failed
    has, asks = lender.page_tokens, borrower.page_tokens
    assert found["peer"] >= sum((len(prompt) - 1) // has * has // asks * asks for prompt in prompts)
    assert sum(found.values()) == sum(map(len, prompts))
    assert not found["storage"]
