"""Weights that are updated in a running vLLM: by its own EngineCore and worker, around the bench's engines."""

# vLLM is in its engine's own environment, which no type checker looks into.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import Engine, RequestStatus, Shape
from engine_core import by_a_trainers_extension, core_of

PROMPT = [7 * n % 900 + 1 for n in range(100)]
OTHER = PROMPT[::-1]
MEETS_NOBODY = "were changed while it runs, and no version of them is known: KV is shared with no engine and no store"


class Updatable(Engine):
    """An engine whose weights are updated: `version` says what its KV is of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.core = core_of(self.config, self.scheduler, self._introductions)

    def _introductions(self) -> list[Any]:
        tp = self.shape.tp
        return [{divmod(rank.rank, tp): rank.connector.get_handshake_metadata()} for rank in self.ranks]

    def step(self) -> Any:
        output = super().step()
        self.core.post_step(True)
        return output

    def update(self, version: str | None, method: Any = "reload_weights", **said: Any) -> None:
        """As trainers do: change the weights, and say what they are."""
        self.core.collective_rpc(method, kwargs=said)
        self.version = b"updated" if version is None else version.encode()
        if version is not None:
            self.core.set_weight_version(version)

    @property
    def identities(self) -> set[str]:
        return {rank.connector.get_handshake_metadata().weights.identity for rank in self.ranks}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., Updatable]]:
    made: list[Updatable] = []

    def make(*options: tuple[str, Any], **shape: Any) -> Updatable:
        made.append(Updatable(Shape(options=options, **shape), tmp_path / "model"))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


_names = iter(range(1 << 30))


def computed(engine: Updatable, prompt: list[int] = PROMPT, tokens: int = 2, **params: Any) -> tuple[int, int]:
    """Have a request answered rightly; the first positions that the engine computed of it."""
    name = f"r-{next(_names)}"
    engine.ask(name, prompt, tokens, params or None)
    engine.finish(name)
    assert engine.said[name] == [1] * tokens
    return next((first, stop) for known, first, stop in engine.computed if known == name)


def prefilled(engine: Updatable, prompt: list[int] = PROMPT) -> dict[str, Any] | None:
    """The answer of a prefill for its other half."""
    name = f"p-{next(_names)}"
    engine.ask(name, prompt, 1, {"do_remote_decode": True})
    engine.finish(name)
    assert engine.said[name] == [1]
    return engine.answers.get(name)


def received(engine: Updatable) -> int:
    return engine.stats.get("received_requests", 0)


@pytest.mark.parametrize(("src", "dst"), [({}, {}), ({"tp": 2}, {"layout": "LBHNC"})], ids=["equal", "tp2-to-1"])
def test_engines_of_one_version_meet_and_of_two_refuse_each_other_with_both(
    engines: Callable[..., Updatable], caplog: pytest.LogCaptureFixture, src: dict[str, Any], dst: dict[str, Any]
) -> None:
    a, b = engines(**src), engines(**dst)
    assert computed(b, **prefilled(a) or {}) == (99, 100)
    assert received(b) == 1
    (before,) = a.identities
    a.update("7")
    a.drain()  # what b has fetched is free when a steps
    assert a.identities == {f"{before}, version 7"}
    assert computed(b, OTHER, **prefilled(a, OTHER) or {}) == (0, 100)
    assert received(b) == 1
    assert re.search(
        rf"peer holds weights {before[:12]}, version 7 of .* this side holds weights {before[:12]} of", caplog.text
    )
    b.update("7")
    a.drain()  # what b was refused
    for prompt in (PROMPT, OTHER):
        assert computed(b, prompt, **prefilled(a, prompt) or {}) == (99, 100)
    assert received(b) == 3
    for engine in (a, b):
        engine.drain()


def test_without_a_version_nobody_is_met_and_that_is_said_until_there_is_one(
    engines: Callable[..., Updatable], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    a, b = engines(), engines()
    asked = prefilled(a)
    b.update(None)
    assert MEETS_NOBODY in caplog.text
    caplog.clear()
    assert computed(b, **asked or {}) == (0, 100)
    assert re.search(rf"r-\d+ is computed here: the weights of .* {MEETS_NOBODY}", caplog.text)
    assert received(b) == 0
    a.update(None)
    assert prefilled(a, PROMPT[1:]) is None
    a.drain()  # nothing of it is kept, nor of what nobody has asked for
    for engine in (a, b):
        engine.version = b"8"
        engine.core.set_weight_version("8")
    assert computed(b, OTHER, **prefilled(a, OTHER) or {}) == (99, 100)


def test_what_was_offered_and_what_is_fetched_ends_with_the_update(engines: Callable[..., Updatable]) -> None:
    """Decode waits for one request that is not computed yet; one is offered that nobody has asked for."""
    a, b = engines(), engines()
    offered = prefilled(a)
    b.ask("d-1", PROMPT, 5, {**(offered or {}), "remote_request_id": "to come"})
    b.until(lambda: b.step() is not None and a.ranks[0].connector._worker is not None, "a step")
    a.update("7")
    b.finish("d-1")  # it heard at once, and the deadline is 20 s
    assert b.said["d-1"] == [1] * 5
    for engine in (a, b):
        engine.drain()
    b.update("7")
    assert computed(b, **offered or {}) == (0, 100)
    assert received(b) == 0


def test_a_version_counts_when_no_block_is_in_use_and_no_block_of_before_is_found_or_given(
    engines: Callable[..., Updatable], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    a, b = engines(), engines()
    a.ask("runs", PROMPT, 50)
    a.until(lambda: len(a.said.get("runs", ())) > 3, "some tokens")
    a.update("7")
    b.update("7")
    assert "version 7 as soon as no block is in use" in caplog.text
    a.ask("beside it", PROMPT, 2, {"do_remote_decode": True})
    a.until(lambda: "beside it" in a.ended, "its end")
    assert "beside it" not in a.answers
    assert not any("version 7" in identity for identity in a.identities)
    a.scheduler.finish_requests("runs", RequestStatus.FINISHED_ABORTED)
    a.drain()
    assert all("version 7" in identity for identity in a.identities)
    answer = prefilled(a)
    assert next(span[1:] for span in reversed(a.computed)) == (0, 100)
    assert computed(b, **answer or {}) == (99, 100)


def test_requests_that_wait_while_the_weights_are_updated_are_served_by_the_new_ones(
    engines: Callable[..., Updatable],
) -> None:
    """vLLM is paused: what comes is queued."""
    a, b = engines(), engines()
    a.ask("p-1", PROMPT, 1, {"do_remote_decode": True})
    a.update("7")
    b.update("7")
    a.finish("p-1")
    assert a.said["p-1"] == [1]
    assert computed(b, **a.answers["p-1"]) == (99, 100)


def test_the_store_keeps_what_was_before_and_shares_what_comes_by_its_version(
    engines: Callable[..., Updatable], tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    root = ("root", str(tmp_path / "store"))
    a, b, c = (engines(root) for _ in range(3))
    computed(a)
    a.drain()
    a.update(None)
    assert computed(a, OTHER) == (0, 100)
    a.drain()
    stored = a.stats["stored_blocks"]
    assert stored == 6
    a.core.set_weight_version("updated")
    assert computed(a) == (0, 100)
    a.drain()
    assert a.stats["stored_blocks"] == stored + 6
    c.update("updated")
    assert computed(c) == (96, 100)
    assert computed(c, OTHER) == (0, 100)
    assert computed(b) == (96, 100)


def test_what_a_caller_calls_weights_that_nobody_changed_is_no_version_of_them(
    engines: Callable[..., Updatable],
) -> None:
    a, b = engines(), engines()
    a.core.set_weight_version("0")
    assert computed(b, **prefilled(a) or {}) == (99, 100)


def test_another_name_for_the_same_weights_counts_and_costs_no_block(engines: Callable[..., Updatable]) -> None:
    a, b = engines(), engines()
    a.update("7")
    computed(a)
    for engine, version in ((a, "8"), (b, "8")):
        engine.version = b"7"
        engine.core.set_weight_version(version)
    b.update("8")
    b.version = b"7"
    answer = prefilled(a)
    assert next(span[1:] for span in reversed(a.computed)) == (96, 100)
    assert computed(b, **answer or {}) == (99, 100)


def failing(wrapper: Any) -> None:
    wrapper.worker.reload_weights()
    raise OSError("half of them")


def session(engine: Updatable) -> None:
    engine.core.collective_rpc("start_weight_update")
    engine.core.collective_rpc("update_weights", None, (), {"update_info": {}})
    engine.core.collective_rpc("finish_weight_update")


@pytest.mark.parametrize("way", ["reload_weights", by_a_trainers_extension, failing, session], ids=str)
def test_whatever_changes_weights_is_noticed_and_nothing_else(engines: Callable[..., Updatable], way: Any) -> None:
    a = engines()
    before = a.identities
    a.core.collective_rpc("get_model")
    a.core.collective_rpc(lambda wrapper: wrapper.worker.get_model())
    assert a.identities == before
    if way is session:
        session(a)
    elif way is failing:
        with pytest.raises(OSError, match="half of them"):
            a.update(None, failing)
    else:
        a.update(None, way)
    (now,) = a.identities
    assert re.fullmatch(f"{next(iter(before))}, changed as [0-9a-f]{{32}}", now)
    a.core.set_weight_version("7")
    session(a)
    assert all("changed as" in identity for identity in a.identities)
