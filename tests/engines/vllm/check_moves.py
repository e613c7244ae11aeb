"""A request that is decoded by one engine of vLLM's own parts moves to another, as a router asks it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench import Engine, RequestStatus
from check_handover import PROMPT, engines

__all__ = ["engines"]

MOVES = (("movable_s", 2.0),)


def decode_until(engine: Engine, name: str, tokens: int, total: int = 60, **params: Any) -> list[int]:
    """Begin a request that may move, as NAME, and go on until it has said so many tokens."""
    engine.ask(name, PROMPT, total, {"kvmover_movable": name, **params})
    engine.until(lambda: len(engine.said.get(name, ())) >= tokens, f"{tokens} tokens of {name}")
    return list(engine.said[name])


def where(engine: Engine, name: str, tokens: int, **more: Any) -> dict[str, Any]:
    """What a router says of a request of which it has the first `tokens` tokens, to the engine that it goes to."""
    home = engine.scheduler.get_kv_connector()._scheduler.home
    remote = {"remote_engine_id": home.engine, "remote_host": home.host, "remote_port": home.port}
    return {"do_remote_prefill": True, "remote_request_id": name, "remote_num_tokens": tokens - 1, **remote, **more}


def leave(engine: Engine, name: str) -> None:
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def both(first: Engine, second: Engine, name: str) -> None:
    """Step both until a request of the second has ended: the first has work as long as its blocks are held."""

    def stepped() -> bool:
        if first.scheduler.has_requests():
            first.step()
        return name in second.ended

    second.until(stepped, f"the end of {name}")


@pytest.mark.parametrize("said", [1, 12, 13, 29])
@pytest.mark.parametrize(("src", "dst"), [({"tp": 2}, {"block_tokens": 32}), ({"block_tokens": 32}, {"tp": 2})])
def test_a_request_goes_on_in_another_engine_and_nothing_of_it_is_computed_again(
    engines: Callable[..., Engine], src: dict[str, Any], dst: dict[str, Any], said: int
) -> None:
    a, b = engines(options=MOVES, **src), engines(options=MOVES, **dst)
    prompt = [*PROMPT, *decode_until(a, "r", said)]
    leave(a, "r")
    b.ask("r-b", prompt, 5, where(a, "r", len(prompt)))
    both(a, b, "r-b")
    assert b.computed[0] == ("r-b", len(prompt) - 1, len(prompt))
    assert b.said["r-b"] == [1] * 5
    a.drain()
    b.drain()
    assert (a.stats["moved_requests"], a.stats.get("sent_failures", 0)) == (1, 0)
    assert b.stats["received_requests"] == 1


def test_what_is_there_is_copied_while_it_decodes_and_the_rest_when_it_has_stopped(
    engines: Callable[..., Engine],
) -> None:
    a, b = engines(tp=2, options=MOVES), engines(block_tokens=32, options=MOVES)
    first = [*PROMPT, *decode_until(a, "r", 10)]
    b.ask("copy", first, 1, where(a, "r", len(first), kvmover_copy=True))
    both(a, b, "copy")
    prompt = [*PROMPT, *a.said["r"]]
    assert len(first) < len(prompt) < len(PROMPT) + 60, "it went on meanwhile"
    leave(a, "r")
    b.computed.clear()
    before = b.stats["received_bytes"]
    b.ask("r-b", prompt, 5, where(a, "r", len(prompt)))
    both(a, b, "r-b")
    assert b.computed[0] == ("r-b", len(prompt) - 1, len(prompt))
    assert b.said["r-b"] == [1] * 5
    whole = (len(first) - 1) // 32 * 32
    assert (b.stats["received_bytes"] - before) * (len(first) - 1) == before * (len(prompt) - 1 - whole)
    a.drain()
    b.drain()


def test_a_request_that_nobody_takes_is_answered_where_it_is_and_leaves_nothing_behind(
    engines: Callable[..., Engine],
) -> None:
    a = engines(options=MOVES)
    decode_until(a, "r", 60)
    a.drain()
    assert a.said["r"] == [1] * 60
    assert not a.stats.get("sent_failures")


def test_a_request_whose_client_left_is_kept_for_a_time_and_no_longer(engines: Callable[..., Engine]) -> None:
    a, b = engines(options=(("movable_s", 0.2),)), engines()
    prompt = [*PROMPT, *decode_until(a, "r", 5)]
    leave(a, "r")
    a.drain()
    b.ask("late", prompt, 5, where(a, "r", len(prompt)))
    b.finish("late")
    assert (b.computed[0][1], b.said["late"]) == (0, [1] * 5)


def test_an_engine_that_lets_nothing_move_gives_its_blocks_back_at_once(engines: Callable[..., Engine]) -> None:
    a = engines()
    decode_until(a, "r", 5)
    leave(a, "r")
    assert not a.scheduler.has_finished_requests() or not a.step().total_num_scheduled_tokens
    a.drain()


def test_the_decode_of_a_prefill_may_move_and_move_back(engines: Callable[..., Engine]) -> None:
    prefill, a, b = engines(), engines(tp=2, options=MOVES), engines(block_tokens=32, options=MOVES)
    prefill.ask("p-1", PROMPT, params={"do_remote_decode": True})
    prefill.finish("p-1")
    prompt = [*PROMPT, *decode_until(a, "r", 7, **prefill.answers["p-1"])]
    leave(a, "r")
    b.ask("r-b", prompt, 60, {**where(a, "r", len(prompt)), "kvmover_movable": "r-b"})
    b.until(lambda: (a.scheduler.has_requests() and a.step() and False) or len(b.said.get("r-b", ())) >= 9, "9 tokens")
    back = [*prompt, *b.said["r-b"]]
    leave(b, "r-b")
    a.computed.clear()
    a.ask("r-a", back, 5, where(b, "r-b", len(back)))
    both(b, a, "r-a")
    assert a.computed[0] == ("r-a", len(back) - 1, len(back))
    assert a.said["r-a"] == [1] * 5
    for engine in (prefill, a, b):
        engine.drain()


def test_a_request_that_is_preempted_may_move_when_it_decodes_again(engines: Callable[..., Engine]) -> None:
    a, b = engines(options=MOVES, blocks=14), engines(options=MOVES)
    a.ask("other", PROMPT[:30], 120)
    decode_until(a, "r", 5, total=90)
    a.until(lambda: a.scheduler.requests["r"].num_preemptions, "a preemption")
    a.finish("other")
    a.until(lambda: len(a.said["r"]) >= 45, "45 tokens")
    prompt = [*PROMPT, *a.said["r"]]
    leave(a, "r")
    b.ask("r-b", prompt, 5, where(a, "r", len(prompt)))
    both(a, b, "r-b")
    assert (b.computed[0][1], b.said["r-b"]) == (len(prompt) - 1, [1] * 5)
    a.drain()


def test_engines_that_guess_tokens_move_those_that_were_right(engines: Callable[..., Engine]) -> None:
    a, b = engines(options=MOVES, drafts=3), engines(tp=2, options=MOVES, drafts=3)
    prompt = [*PROMPT, *decode_until(a, "r", 10)]
    leave(a, "r")
    b.ask("r-b", prompt, 5, where(a, "r", len(prompt)))
    both(a, b, "r-b")
    assert b.said["r-b"][:5] == [1] * 5
    a.drain()
