"""A keeper behind vLLM: an engine of TP2 is killed in mid-request and comes back as TP1, with all that it had."""

from __future__ import annotations

from pathlib import Path

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.keepers import Sessions, live_keeper
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_servers import kvmover, vllm

_RUNNING, _LOADED = "vllm:num_requests_running", "vllm:kvmover_loaded_blocks_total"


def test_pages_outlive_an_engine_that_is_killed(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """The second turns ask for all that the first ones computed."""
    weights, sessions = model("qwen3", "vllm"), Sessions.some()
    with live_keeper(tmp_path) as keeper:
        (first,) = servers.start(vllm("vllm-keeper-1", weights, kv=kvmover(root=keeper.location(1)), tp=2))
        warm(plain.ready())
        wanted = many(lambda prompt: ask(plain, prompt), sessions.asked)
        got = many(lambda prompt: ask(first, prompt), sessions.asked)
        assert not results.add("vllm", "keeper, first life", wanted, got).failed
        committed = sessions.killed_in_the_middle(first, ask, lambda: first.metrics(_RUNNING)[_RUNNING], keeper)
        servers.running.remove(first)

        (again,) = servers.start(vllm("vllm-keeper-2", weights, kv=kvmover(root=keeper.location(2))))
        turns = sessions.second_turns(plain, ask)
        wanted = many(lambda turn: ask(plain, turn), turns)
        got = many(lambda turn: ask(again, turn), turns)
        read = int(again.metrics(_LOADED)[_LOADED])
        said = f"{read} of {committed} blocks"
        assert not results.add("vllm", "keeper, after kill -9, TP2 back as TP1", wanted, got, said).failed
        assert read >= 0.95 * committed
        assert usage(again) == 0
