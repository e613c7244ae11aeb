"""A keeper behind SGLang: an engine is killed in mid-request and comes back as TP2, with all that it had committed."""

from __future__ import annotations

from pathlib import Path

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.keepers import Sessions, live_keeper
from tests.live.server import Server
from tests.live.sglang_client import ask, loads, usage, warm
from tests.live.sglang_servers import linker, sglang
from tests.live.table import Results

_PAGE_TOKENS = 16


def test_pages_outlive_an_engine_that_is_killed(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """The second turns ask for all that the first ones computed."""
    weights, sessions = model("llama", "sglang"), Sessions.some()
    with live_keeper(tmp_path) as keeper:
        (first,) = servers.start(sglang("sglang-keeper-1", weights, *linker(keeper.location(1))))
        warm(plain.ready())
        wanted = many(lambda prompt: ask(plain, prompt), sessions.asked)
        got = many(lambda prompt: ask(first, prompt), sessions.asked)
        assert not results.add("sglang", "keeper, first life", wanted, got).failed
        committed = sessions.killed_in_the_middle(first, ask, lambda: loads(first), keeper)
        servers.running.remove(first)

        (again,) = servers.start(sglang("sglang-keeper-2", weights, *linker(keeper.location(2)), tp=2))
        turns = sessions.second_turns(plain, ask)
        wanted = many(lambda turn: ask(plain, turn), turns)
        got = many(lambda turn: ask(again, turn), turns)
        read = sum(answer.cached_tokens for answer in got) // _PAGE_TOKENS
        said = f"{read} of {committed} pages"
        assert not results.add("sglang", "keeper, after kill -9, TP1 back as TP2", wanted, got, said).failed
        assert read >= 0.95 * committed
        assert usage(again) == 0
