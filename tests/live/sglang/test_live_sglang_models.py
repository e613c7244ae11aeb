"""SGLang servers of other models: bfloat16, a latent cache (MLA), layers with sliding windows."""

from __future__ import annotations

from collections.abc import Sequence

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask, counted, split, usage, warm
from tests.live.sglang_servers import DECODE, DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results


def test_bfloat16(servers: Servers, model: ModelMaker, results: Results) -> None:
    """One request at a time, so that both compute the same shapes: log probabilities are equal to the last bit."""
    weights, kind = model("llama-bf16", "sglang"), "bfloat16"
    pull = {"KVMOVER_MOVER_VERB": "pull", "KVMOVER_MOVER_ROUTE": "direct"}
    trio = servers.start(
        sglang("sglang-bf16-plain", weights, dtype=kind, page_tokens=32),
        sglang("sglang-bf16-prefill", weights, mode=PREFILL, dtype=kind, page_tokens=32),
        sglang("sglang-bf16-decode", weights, mode=DECODE, dtype=kind, page_tokens=32, environment=pull),
    )
    _same(trio, results, "bf16, pages of 32 tokens, pulled straight from page to page", at_once=1, gap=0.0)
    _end(trio, servers)


def test_a_latent_cache(servers: Servers, model: ModelMaker, results: Results) -> None:
    """Two prefill ranks hold the same latents, and each sends a share."""
    weights = model("latent-yarn", "sglang")
    packed = {"KVMOVER_MOVER_VERB": "push", "KVMOVER_MOVER_ROUTE": "packed"}
    trio = servers.start(
        sglang("sglang-latent-plain", weights),
        sglang("sglang-latent-prefill-tp2", weights, mode=PREFILL, tp=2),
        sglang("sglang-latent-decode", weights, mode=DECODE_WITH_PREFIXES, environment=packed),
    )
    _same(trio, results, "MLA, TP2 to TP1, packed")
    _end(trio, servers)


def test_sliding_windows(servers: Servers, model: ModelMaker, results: Results) -> None:
    """Windows of 64 tokens in three of four layers: of those, the last pages of a request move."""
    weights = model("windows", "sglang")
    trio = servers.start(
        sglang("sglang-windows-plain", weights),
        sglang("sglang-windows-prefill", weights, mode=PREFILL),
        sglang("sglang-windows-decode-tp2", weights, mode=DECODE, tp=2),
    )
    _same(trio, results, "sliding windows, TP1 to TP2")
    _end(trio, servers)


def test_pages_of_other_sizes(plain: Server, servers: Servers, model: ModelMaker, results: Results) -> None:
    started = _pairs_of_other_sizes("llama", servers, model)
    _behind_prefixes(plain, started, results, "pages of {} tokens")
    _end(started, servers)


def test_windows_in_pages_of_other_sizes(servers: Servers, model: ModelMaker, results: Results) -> None:
    """A window of 64 tokens that ends anywhere in a page of 64 begins anywhere in one of 16."""
    (alone,) = servers.start(sglang("sglang-windows-plain", model("windows", "sglang")))
    started = _pairs_of_other_sizes("windows", servers, model)
    _behind_prefixes(alone, started, results, "sliding windows, pages of {} tokens")
    _end([alone, *started], servers)


def _pairs_of_other_sizes(name: str, servers: Servers, model: ModelMaker) -> list[Server]:
    """From pages of 64 to those of 16, and the other way."""
    weights = model(name, "sglang")
    return servers.start(
        sglang(f"sglang-{name}-prefill-64", weights, "--chunked-prefill-size", "256", mode=PREFILL, page_tokens=64),
        sglang(f"sglang-{name}-decode-16", weights, mode=DECODE_WITH_PREFIXES, tp=2),
        sglang(f"sglang-{name}-prefill-16", weights, mode=PREFILL),
        sglang(f"sglang-{name}-decode-64", weights, mode=DECODE_WITH_PREFIXES, page_tokens=64),
    )


def _behind_prefixes(alone: Server, started: Sequence[Server], results: Results, scenario: str) -> None:
    """Each prompt, and then the same with more behind it: of that decode has a prefix, in pages of its own."""
    warm(alone.ready())
    for seed, sizes, pair in ((31, "64 to 16", started[:2]), (33, "16 to 64", started[2:])):
        once = prompts_of(10, seed=seed, least_tokens=100)
        longer = [[*prompt, *tail] for prompt, tail in zip(once, prompts_of(10, seed=seed + 1), strict=True)]
        for prompts, what in ((once, ""), (longer, ", behind a prefix")):
            wanted = many(lambda prompt: ask(alone, prompt), prompts)
            got = many(lambda prompt, pair=pair: split(*pair, prompt), prompts)
            assert not results.add("sglang", scenario.format(sizes) + what, wanted, got).failed
        assert [usage(server) for server in pair] == [0, 0]


def _same(trio: Sequence[Server], results: Results, scenario: str, at_once: int = 8, gap: float = 1e-3) -> None:
    plain, first, second = trio
    warm(plain)
    prompts = prompts_of(20, seed=20)
    wanted = many(lambda prompt: ask(plain, prompt), prompts, at_once)
    got = many(lambda prompt: split(first, second, prompt), prompts, at_once)
    moved = counted(second, "kvmover_received_bytes_total")
    assert not results.add("sglang", scenario, wanted, got, f"{moved / 1e6:.1f} MB moved", gap).failed
    assert moved > 0
    assert usage(first) == usage(second) == 0


def _end(trio: Sequence[Server], servers: Servers) -> None:
    """The next three need their memory."""
    for server in trio:
        server.kill()
        servers.running.remove(server)
