"""Hints in vLLM's own scheduler: a prompt that is pinned is found after a crowd, and no request waits for a pin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import Engine, Shape

PROMPT = [7 * n % 900 + 1 for n in range(100)]
#: Blocks of 16 tokens; one stands for none.
BLOCKS = 41


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(Shape(blocks=BLOCKS), tmp_path / "model")
    yield made
    pins = made.scheduler.connector._hints.pins
    pins.check()
    pins.forget()
    assert free(made) == BLOCKS - 1
    made.close()


def free(engine: Engine) -> int:
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def hints(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    action = {"action_id": "session", "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"kvmover_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


def ask(engine: Engine, name: str, prompt: list[int], params: dict[str, Any] | None = None) -> None:
    engine.ask(name, prompt, 4, params)
    engine.finish(name)
    assert engine.said[name] == [1] * 4
    engine.until(lambda: not engine.scheduler.has_requests(), "the scheduler to forget all requests")


def computed(engine: Engine, name: str) -> int:
    """Tokens of a request that no cache had."""
    return sum(stop - first for request, first, stop in engine.computed if request == name)


def crowd(engine: Engine) -> None:
    for number in range(8):
        ask(engine, f"crowd {len(engine.said)}", [(number + 2) * 11 * n % 800 + 1 for n in range(100)])


def told(engine: Engine) -> dict[tuple[str, str], int]:
    counts = engine.scheduler.connector._accounts.ledger.hints
    return {(action, outcome): count for (_, action, outcome), count in counts.items()}


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
def test_a_sessions_blocks_stay_while_its_tool_runs(engine: Engine, pinned: bool) -> None:
    ask(engine, "first", PROMPT, hints("kv.pin", {"ttl_seconds": 300}) if pinned else None)
    assert free(engine) == BLOCKS - 1 - 6 * pinned
    crowd(engine)
    ask(engine, "next", [*PROMPT, 5, 6, 7])
    hits = 103 + 3 - computed(engine, "next")
    assert hits == (96 if pinned else 0)
    assert told(engine) == ({("pin", "met"): 1} if pinned else {})


def test_a_pin_ends_by_its_name_and_for_who_needs_its_room(engine: Engine) -> None:
    ask(engine, "first", PROMPT, hints("kv.pin", {"ttl_seconds": 300}))
    ask(engine, "last", [*PROMPT, 5], hints("kv.pin", {"ttl_seconds": 0}))
    assert free(engine) == BLOCKS - 1
    ask(engine, "again", PROMPT, hints("kv.pin", {"ttl_seconds": 300}))
    ask(engine, "large", [13 * n % 700 + 1 for n in range(38 * 16)])
    assert free(engine) == BLOCKS - 1


def test_what_cannot_be_met_is_refused_and_its_request_served(engine: Engine) -> None:
    for kind, payload in (("kv.demote", {}), ("kv.retain", {"priority": 1}), ("kv.share", {}), ("kv.fetch", {})):
        ask(engine, kind, PROMPT, hints(kind, payload))
    assert told(engine) == {
        ("demote", "no_host"): 1,
        ("retain", "no_priorities"): 1,
        ("share", "no_store"): 1,
        ("other", "unknown"): 1,
    }
