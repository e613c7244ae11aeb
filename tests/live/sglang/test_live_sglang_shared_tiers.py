"""A prefill and a decode of SGLang with kvmover's tiers and one page store, and a server killed while it stores."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread

import pytest

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang.test_live_sglang_radix import conversations, told
from tests.live.sglang.test_live_sglang_tiers import LITTLE, tiered
from tests.live.sglang_client import ask, counted, split, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, hicache, sglang
from tests.live.table import Results


@pytest.mark.parametrize("pp", [1, 2])
def test_prefill_and_decode_keep_their_tiers_and_share_a_store(
    pp: int, plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, ours = model("llama", "sglang"), ("--radix-cache-backend", "kvmover", *hicache(tmp_path, "page_first"))
    commands = [
        sglang(f"sglang-tiers-prefill-{pp}", weights, *LITTLE, *ours, mode=PREFILL, pp=pp),
        sglang("sglang-tiers-decode", weights, *LITTLE, *ours, mode=DECODE_WITH_PREFIXES),
    ]
    first, second = servers.start(*commands)
    warm(plain.ready())
    prompts = conversations(100, seed=99)
    wanted = [ask(plain, prompt, 4) for prompt in prompts]
    for when in ("", ", after a restart"):
        got = [split(first, second, prompt, 4) for prompt in prompts]
        found = {tier: cached(first, tier) for tier in ("device", "host", "storage")}
        said = ", ".join(f"{tokens:,.0f} {tier}" for tier, tokens in found.items())
        title = "tiers of prefill and decode" + f", prefill PP{pp}" * (pp > 1)
        assert not results.add("sglang", title + when, wanted, got, said).failed
        assert usage(first) == usage(second) == 0
        assert found["host"] > 2_000
        time.sleep(2.0)  # the last pages are on their way to storage
        servers.stop([first, second])
        if not when:
            first, second = servers.start(*commands)
    assert found["storage"] > 5_000


def cached(server: Server, source: str) -> float:
    """Prompt tokens that SGLang itself says were cached there."""
    text = server.get("/metrics")[1]
    lines = [line for line in text.splitlines() if line.startswith("sglang:cached_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if f'cache_source="{source}"' in line)


def test_a_server_that_is_killed_while_it_writes_costs_its_successor_misses_alone(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights = model("llama", "sglang")
    command = tiered("sglang-tiers-killed", weights, tmp_path)
    (first,) = servers.start(command)
    warm(plain.ready(), first)
    prompts = conversations(60, seed=97)
    wanted = [ask(plain, prompt, 4) for prompt in prompts]
    asking = Thread(target=lambda: many(lambda prompt: ask(first, prompt, 4), prompts))
    asking.start()
    while counted(first, "kvmover_tier_stored_pages_total") < 50:
        time.sleep(0.01)
    first.kill()
    asking.join()
    (second,) = servers.start(command)
    warm(second)
    got = [ask(second, prompt, 4) for prompt in prompts]
    stored = told(second, "storage")
    said = f"{stored:,.0f} tokens from storage"
    assert not results.add("sglang", "tiers under the radix cache, killed while it writes", wanted, got, said).failed
    assert stored >= 256
    assert usage(second) == 0
