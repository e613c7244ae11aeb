"""SGLang with kvmover's radix cache, host memory and page store: what left the device is not computed again."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread

import pytest

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Command, Server, free_port
from tests.live.sglang.test_live_sglang_radix import conversations, told
from tests.live.sglang_client import ask, counted, split, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, hicache, sglang
from tests.live.table import Results

#: Room on the device for three prompts of the longest, of 24 conversations; long prompts come in chunks.
_LITTLE = ("--max-total-tokens", "2048", "--chunked-prefill-size", "256")
_TIERS = ("device", "host", "storage", "computed")


def tiered(name: str, model: Path, root: Path, tp: int = 1, pp: int = 1, cp: int = 1) -> Command:
    """`cp`: of the tensor-parallel ranks, how many hold the same KV."""
    return sglang(
        name,
        model,
        *(*_LITTLE, "--attn-cp-size", str(cp), "--radix-cache-backend", "kvmover", *hicache(root, "page_first_direct")),
        tp=tp,
        pp=pp,
        environment={"KVMOVER_METRICS_PORT": str(free_port())},
    )


def hits(server: Server) -> dict[str, float]:
    return {source: told(server, source) for source in _TIERS}


def written(server: Server) -> None:
    """Wait until nothing is on its way to storage."""
    for _ in range(300):
        time.sleep(0.1)
        if not counted(server, "kvmover_tier_open_operations") + counted(server, "kvmover_tier_writing_pages"):
            time.sleep(1.0)  # the counts are half a second old at most
            return
    raise AssertionError(f"{server.name} does not end its writes")


_GRIDS = {"TP1": (1, 1, 1), "TP2": (2, 1, 1), "TP1 PP2": (1, 2, 1), "TP2 PP2": (2, 2, 1), "TP2 CP2": (2, 1, 2)}


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        *(("llama", grid) for grid in ("TP1", "TP2", "TP1 PP2", "TP2 PP2")),
        *(("latent-yarn", "TP2"), ("latent-yarn", "TP2 CP2"), ("windows", "TP1")),
    ],
)
def test_200_requests_get_the_same_tokens_from_the_host_and_after_a_restart_from_storage(
    kind: str, grid: str, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, name = model(kind, "sglang"), f"sglang-tiers-{kind}-{grid.replace(' ', '-')}"
    plain, first = servers.start(
        sglang(f"sglang-plain-{kind}", weights), tiered(name, weights, tmp_path, *_GRIDS[grid])
    )
    warm(plain, first)
    prompts = conversations(200, seed=95)
    before = hits(first)
    wanted = [ask(plain, prompt, 4) for prompt in prompts]
    got = [ask(first, prompt, 4) for prompt in prompts]
    found = {source: tokens - before[source] for source, tokens in hits(first).items()}
    said = ", ".join(f"{tokens:,.0f} {source}" for source, tokens in found.items())
    title = f"tiers under the radix cache, {kind}, {grid}"
    assert not results.add("sglang", title, wanted, got, said).failed
    assert min(found["host"], found["storage"]) > 5_000
    assert sum(found.values()) - found["computed"] == sum(answer.cached_tokens for answer in got)
    assert sum(found.values()) == sum(map(len, prompts))
    assert usage(first) == 0

    at_once = conversations(60, seed=96)
    wanted_at_once = many(lambda prompt: ask(plain, prompt, 4), at_once)
    got = many(lambda prompt: ask(first, prompt, 4), at_once)
    assert not results.add("sglang", f"{title}, 8 at once", wanted_at_once, got).failed
    assert usage(first) == 0
    written(first)
    servers.stop([first])

    (again,) = servers.start(tiered(f"{name}-again", weights, tmp_path, *_GRIDS[grid]))
    warm(again)
    before = hits(again)
    got = [ask(again, prompt, 4) for prompt in prompts]
    found = {source: tokens - before[source] for source, tokens in hits(again).items()}
    said = ", ".join(f"{tokens:,.0f} {source}" for source, tokens in found.items())
    assert not results.add("sglang", f"{title}, after a restart", wanted, got, said).failed
    assert min(found["storage"], found["host"]) > 5_000
    # All was stored; the last token of a prompt is computed, and the rest of its page.
    assert found["computed"] <= 16 * len(prompts)
    assert sum(found.values()) == sum(map(len, prompts))
    servers.stop([plain, again])


@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_no_fewer_tokens_are_found_than_by_sglangs_own_tiers_on_the_same_schedule(
    kind: str, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights = model(kind, "sglang")
    for name in ("own", "ours"):
        (tmp_path / name).mkdir()
    own, ours = servers.start(
        sglang(f"sglang-own-tiers-{kind}", weights, *_LITTLE, *hicache(tmp_path / "own", "page_first_direct")),
        tiered(f"sglang-tiers-beside-{kind}", weights, tmp_path / "ours"),
    )
    warm(own, ours)
    prompts = conversations(200, seed=98)
    wanted = [ask(own, prompt, 4) for prompt in prompts]
    got = [ask(ours, prompt, 4) for prompt in prompts]
    hits = [sum(answer.cached_tokens for answer in answers) for answers in (wanted, got)]
    said = f"cached tokens {hits[1]:,}, SGLang's own {hits[0]:,}"
    assert not results.add("sglang", f"tiers beside SGLang's own, {kind}", wanted, got, said).failed
    assert hits[1] >= hits[0] > 20_000
    servers.stop([own, ours])


@pytest.mark.parametrize("pp", [1, 2])
def test_prefill_and_decode_keep_their_tiers_and_share_a_store(
    pp: int, plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, ours = model("llama", "sglang"), ("--radix-cache-backend", "kvmover", *hicache(tmp_path, "page_first"))
    commands = [
        sglang(f"sglang-tiers-prefill-{pp}", weights, *_LITTLE, *ours, mode=PREFILL, pp=pp),
        sglang("sglang-tiers-decode", weights, *_LITTLE, *ours, mode=DECODE_WITH_PREFIXES),
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
