"""SGLang servers of hybrid models: states move between halves, and come back from the host and from storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.hybrid_models import KINDS, SGLANG_KINDS
from tests.live.server import Command, Server, free_port
from tests.live.sglang.test_live_sglang_tiers import LITTLE, hits, written
from tests.live.sglang_client import ask, counted, split, usage, warm
from tests.live.sglang_servers import DECODE, PREFILL, hicache, sglang
from tests.live.table import Results

#: Longer than a chunk, behind which the state is kept.
_PROMPTS = prompts_of(20, seed=76, least_tokens=300)


def hybrid(name: str, weights: Path, *more: str, mode: tuple[str, ...] = (), tp: int = 1) -> Command:
    """A server of which SGLang asks pages of one token, since states are kept where a request ends or is chunked.

    States of convolutions are bfloat16 unless they are said to be float32, as the model is.
    """
    environment = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "KVMOVER_METRICS_PORT": str(free_port())}
    states = ("--max-mamba-cache-size", "64", "--chunked-prefill-size", "256")
    return sglang(name, weights, *states, *more, mode=mode, tp=tp, page_tokens=1, environment=environment)


@pytest.mark.parametrize("name", SGLANG_KINDS)
def test_states_move_between_halves_of_unlike_tensor_parallelism(
    name: str, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model(name, "sglang")
    plain, *halves = servers.start(
        hybrid(f"sglang-{name}-plain", weights),
        hybrid(f"sglang-{name}-prefill-tp1", weights, mode=PREFILL),
        hybrid(f"sglang-{name}-decode-tp2", weights, mode=DECODE, tp=2),
        hybrid(f"sglang-{name}-prefill-tp2", weights, mode=PREFILL, tp=2),
        hybrid(f"sglang-{name}-decode-tp1", weights, mode=DECODE),
    )
    warm(plain)
    for words, (first, second), seed in (("TP1 to TP2", halves[:2], 77), ("TP2 to TP1", halves[2:], 78)):
        prompts = prompts_of(20, seed=seed)
        wanted = many(lambda prompt: ask(plain, prompt), prompts)
        got = many(lambda prompt, pair=(first, second): split(*pair, prompt), prompts)
        moved = counted(second, "kvmover_received_bytes_total")
        scenario = f"{KINDS[name]}, {words}"
        assert not results.add("sglang", scenario, wanted, got, f"{moved / 1e6:.1f} MB moved").failed
        assert moved
        assert usage(first) == usage(second) == 0
    servers.stop()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SGLANG_KINDS)
def test_states_come_back_from_the_host_and_from_storage(
    name: str, tp: int, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """The device has room for some of the last prompts and the host for some before them: the newest is asked first."""
    weights, title = model(name, "sglang"), f"tiers under the radix cache, {KINDS[name]}, TP{tp}"
    tiers = (*LITTLE, "--radix-cache-backend", "kvmover", *hicache(tmp_path, "page_first_direct"))
    plain, first = servers.start(
        hybrid(f"sglang-{name}-plain", weights), hybrid(f"sglang-{name}-tiers-tp{tp}", weights, *tiers, tp=tp)
    )
    warm(plain, first)
    wanted = [ask(plain, prompt) for prompt in _PROMPTS]
    got = [ask(first, prompt) for prompt in _PROMPTS]
    assert not results.add("sglang", f"{title}, first life", wanted, got).failed
    found = _same(first, wanted, results, f"{title}, from the newest on")
    assert min(found["host"], found["storage"]) >= 512
    written(first)
    servers.stop([first])
    (again,) = servers.start(hybrid(f"sglang-{name}-again-tp{tp}", weights, *tiers, tp=tp))
    warm(again)
    assert _same(again, wanted, results, f"{title}, after a restart")["storage"] >= 256 * len(_PROMPTS)
    servers.stop([plain, again])


def _same(server: Server, wanted: list[Answer], results: Results, scenario: str) -> dict[str, float]:
    """Returns the prompt tokens by source of the prompts, the last one first; the answers are the plain server's."""
    before = hits(server)
    got = [ask(server, prompt) for prompt in reversed(_PROMPTS)][::-1]
    found = {source: tokens - before[source] for source, tokens in hits(server).items()}
    said = ", ".join(f"{tokens:,.0f} {source}" for source, tokens in found.items() if tokens)
    assert not results.add("sglang", scenario, wanted, got, said).failed
    assert sum(found.values()) == sum(map(len, _PROMPTS))
    assert usage(server) == 0
    return found


@pytest.mark.parametrize("name", SGLANG_KINDS)
def test_sglangs_own_tree_gets_states_back_from_storage(
    name: str, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, storing = model(name, "sglang"), hicache(tmp_path, "page_first_direct")
    (plain,) = servers.start(hybrid(f"sglang-{name}-plain", weights))
    wanted = many(lambda prompt: ask(plain, prompt), _PROMPTS)
    for life, least in (("first life", 0), ("after a restart", 256 * len(_PROMPTS))):
        (server,) = servers.start(hybrid(f"sglang-{name}-hicache", weights, *storing, tp=2))
        warm(server)
        got = many(lambda prompt, server=server: ask(server, prompt), _PROMPTS)
        read = sum(answer.cached_tokens for answer in got)
        said = f"{read} of {sum(map(len, _PROMPTS))} prompt tokens from disk"
        assert not results.add("sglang", f"HiCache storage, {KINDS[name]}, TP2, {life}", wanted, got, said).failed
        assert read >= least
        assert bool(read) == bool(least)
        assert usage(server) == 0
        servers.stop([server])
    servers.stop()
