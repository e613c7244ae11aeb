"""kvmover's page store behind SGLang, through host memory and past it: what one server stored, others read."""

from __future__ import annotations

from pathlib import Path

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask, usage, warm
from tests.live.sglang_servers import hicache, linker, sglang
from tests.live.table import Results

_PAGE_TOKENS = 16


def test_pages_outlive_their_servers(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """A server with a host tier (HiCache) and one with the direct linker write, stop, and start again. Beside them, two
    ranks of another host layout read what one rank wrote."""
    weights = model("llama", "sglang")
    tiers, linked = tmp_path / "tiers", tmp_path / "linked"
    tiers.mkdir()
    linked.mkdir()
    with_tiers = sglang("sglang-hicache", weights, *hicache(tiers, "page_first_direct"))
    with_linker = sglang("sglang-linker", weights, *linker(linked))
    first = servers.start(with_tiers, with_linker)
    warm(plain.ready())
    prompts = prompts_of(20, seed=40, least_tokens=100, most_tokens=900)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    for server, scenario in zip(first, ("HiCache storage, first life", "linker, first life"), strict=True):
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        assert not results.add("sglang", scenario, wanted, got).failed
        assert not any(answer.cached_tokens for answer in got)
        assert usage(server) == 0
    servers.stop(first)

    again = servers.start(
        with_tiers,
        with_linker,
        sglang("sglang-hicache-tp2", weights, *hicache(tiers, "layer_first"), tp=2),
        sglang("sglang-linker-tp2", weights, *linker(tiers), tp=2),
    )
    whole = sum((len(prompt) - 1) // _PAGE_TOKENS * _PAGE_TOKENS for prompt in prompts)
    for server, scenario in zip(
        again,
        (
            "HiCache storage, after a restart",
            "linker, after a restart",
            "HiCache storage of one rank, read by TP2 in another host layout",
            "HiCache storage of one rank, read by a linker of TP2",
        ),
        strict=True,
    ):
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        read = sum(answer.cached_tokens for answer in got)
        said = f"{read} of {sum(map(len, prompts))} prompt tokens from disk"
        assert not results.add("sglang", scenario, wanted, got, said).failed
        # The last token of a prompt is always computed.
        assert read == whole
        assert usage(server) == 0
