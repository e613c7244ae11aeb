"""SGLang with kvmover's radix cache, host memory and page store: what left the device is not computed again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Command, Server, free_port
from tests.live.sglang.test_live_sglang_radix import conversations, told
from tests.live.sglang_client import ask, counted, usage, warm
from tests.live.sglang_servers import hicache, sglang
from tests.live.table import Results

#: Room on the device for three prompts of the longest, of 24 conversations; long prompts come in chunks.
LITTLE = ("--max-total-tokens", "2048", "--chunked-prefill-size", "256")
_TIERS = ("device", "host", "storage", "computed")


def tiered(name: str, model: Path, root: Path, tp: int = 1, pp: int = 1, cp: int = 1) -> Command:
    """`cp`: of the tensor-parallel ranks, how many hold the same KV."""
    return sglang(
        name,
        model,
        *(*LITTLE, "--attn-cp-size", str(cp), "--radix-cache-backend", "kvmover", *hicache(root, "page_first_direct")),
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
    ("kind", "grid", "count"),
    [
        *(("llama", "TP1", 200), ("llama", "TP2", 100), ("llama", "TP1 PP2", 100), ("llama", "TP2 PP2", 100)),
        *(("latent-yarn", "TP2", 100), ("latent-yarn", "TP2 CP2", 100), ("windows", "TP1", 200)),
    ],
)
def test_requests_get_the_same_tokens_from_the_host_and_after_a_restart_from_storage(
    kind: str, grid: str, count: int, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, name = model(kind, "sglang"), f"sglang-tiers-{kind}-{grid.replace(' ', '-')}"
    plain, first = servers.start(
        sglang(f"sglang-plain-{kind}", weights), tiered(name, weights, tmp_path, *_GRIDS[grid])
    )
    warm(plain, first)
    prompts, least_found = conversations(count, seed=95), {100: 500, 200: 5_000}[count]
    before = hits(first)
    wanted = [ask(plain, prompt, 4) for prompt in prompts]
    got = [ask(first, prompt, 4) for prompt in prompts]
    found = {source: tokens - before[source] for source, tokens in hits(first).items()}
    said = ", ".join(f"{tokens:,.0f} {source}" for source, tokens in found.items())
    title = f"tiers under the radix cache, {kind}, {grid}"
    assert not results.add("sglang", title, wanted, got, said).failed
    assert min(found["host"], found["storage"]) > least_found
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
    assert min(found["storage"], found["host"]) > least_found
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
        sglang(f"sglang-own-tiers-{kind}", weights, *LITTLE, *hicache(tmp_path / "own", "page_first_direct")),
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
