"""vLLM's engines with the page store behind their prefix cache: what one has computed, another reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import Engine, RequestStatus, Shape, flip

from kvmover.engines.common import EngineUnsupported

PROMPT = [7 * n % 900 + 1 for n in range(100)]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines over one store, and close them."""
    made: list[Engine] = []
    root = tmp_path / "store"
    root.mkdir()

    def make(*options: tuple[str, Any], folder: Path = tmp_path / "model", **shape: Any) -> Engine:
        made.append(Engine(Shape(options=(("root", str(root)), *options), **shape), folder))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_a_configured_root_is_the_engines_own_unless_it_has_another(
    engines: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("KVMOVER_STORE_ROOT", str(tmp_path / "store"))
    a, b = engines(("root", None)), engines(("root", None))
    own, without = engines(("root", str(tmp_path / "elsewhere"))), engines(("root", "none"))
    compute(a, "a")
    for engine, first in ((b, 96), (own, 0), (without, 0)):
        compute(engine, "b")
        assert engine.computed[0] == ("b", first, 100)


def compute(engine: Engine, name: str, prompt: list[int] = PROMPT, tokens: int = 2) -> None:
    engine.ask(name, prompt, tokens)
    engine.finish(name)
    assert engine.said[name] == [1] * tokens
    engine.drain()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({}, {}),
        ({"tp": 2}, {"tp": 4, "layout": "LBHNC"}),
        ({"layout": "BHLNC"}, {"tp": 2, "kernel_tokens": 8}),
        ({"tp": 2, "latent": True}, {"latent": True, "layout": "BLHNC"}),
        ({"pp": 2}, {"tp": 2}),
    ],
    ids=["equal", "tp2-to-4", "kernel-blocks", "latent", "stages"],
)
def test_a_prompt_that_another_engine_computed_is_read(
    engines: Callable[..., Engine], src: dict[str, Any], dst: dict[str, Any]
) -> None:
    a, b = engines(**src), engines(**dst)
    compute(a, "a")
    compute(b, "b")
    assert b.computed[0] == ("b", 96, 100)
    assert a.stats["stored_blocks"] == 6 * len(a.ranks)
    assert b.stats["loaded_blocks"] == 6 * len(b.ranks)


def test_a_prompt_of_whole_blocks_is_read_but_for_its_last_token(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    compute(a, "a", PROMPT[:96])
    compute(b, "b", PROMPT[:96])
    assert b.computed[0] == ("b", 95, 96)


def test_what_is_generated_is_stored_with_the_prompt(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    compute(a, "a", tokens=30)
    compute(b, "b", PROMPT + [1] * 29)
    assert b.computed[0][1] == 128


def test_blocks_are_read_behind_those_that_the_engine_has_itself(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    compute(a, "a")
    compute(b, "b", [*PROMPT[:32], 3])
    compute(b, "c")
    assert b.stats["loaded_blocks"] == 2 + 4
    assert b.computed[-2:] == [("c", 96, 100), ("c", 100, 101)]


def test_a_damaged_block_is_computed_with_all_behind_it_and_stored_anew(
    engines: Callable[..., Engine], tmp_path: Path
) -> None:
    a, b, c = engines(), engines(), engines()
    compute(a, "a")
    for data in (tmp_path / "store").rglob("*.data"):
        flip(data, 3 * 4096 * 4 + 100)  # blocks are 16 KiB here, stored in order
    compute(b, "b")
    assert b.computed[0] == ("b", 48, 100)
    assert b.stats["failed_loads"] == 1
    compute(c, "c")
    assert c.computed[0] == ("c", 96, 100)


def test_preempted_requests_are_stored_as_they_were_computed(engines: Callable[..., Engine]) -> None:
    a, b = engines(blocks=13), engines()
    a.ask("older", PROMPT[:47], 40)
    a.ask("younger", PROMPT[::-1], 40)
    younger = a.scheduler.requests["younger"]
    a.finish("older", "younger")
    assert younger.num_preemptions
    assert (a.said["older"], a.said["younger"]) == ([1] * 40, [1] * 40)
    a.drain()
    compute(b, "b", PROMPT[::-1])
    assert b.computed[0] == ("b", 96, 100)


def test_an_abort_while_blocks_are_read_gives_them_back(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines(tp=2)
    compute(a, "a")
    b.ask("b", PROMPT)
    b.step()
    b.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    b.drain()
    assert b.computed == []


def test_stored_blocks_are_told_once_by_all_ranks_together(engines: Callable[..., Engine]) -> None:
    a = engines(tp=2, events=True)
    told: list[Any] = []
    take = a.scheduler.connector.take_events
    a.scheduler.connector.take_events = lambda: [told.append(event) or event for event in take()]
    compute(a, "a")
    assert [event.token_ids for event in told] == [PROMPT[n : n + 16] for n in range(0, 96, 16)]
    assert [event.parent_block_hash for event in told[1:]] == [event.block_hashes[0] for event in told[:-1]]
    assert told[0].parent_block_hash is None
    assert {event.medium for event in told} == {"STORAGE"}


def test_a_block_is_told_of_once_however_often_its_prompt_comes(engines: Callable[..., Engine]) -> None:
    a = engines(tp=2, events=True)
    told: list[Any] = []
    take = a.scheduler.connector.take_events
    a.scheduler.connector.take_events = lambda: [told.append(event) or event for event in take()]
    a.ask("first", PROMPT)
    a.ask("beside it", PROMPT)
    a.finish("first", "beside it")
    a.drain()
    compute(a, "again")
    compute(a, "longer", [*PROMPT, *range(12)])
    hashes = [each for event in told for each in event.block_hashes]
    assert len(hashes) == len(set(hashes)) == 7
    assert a.scheduler.reset_connector_cache()
    assert a.scheduler.reset_prefix_cache()
    compute(a, "after a reset")
    assert [each for event in told for each in event.block_hashes][7:] == hashes[:6]


def test_a_reset_of_the_connector_deletes_what_is_stored(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    compute(a, "a")
    assert a.scheduler.reset_connector_cache()
    compute(b, "b")
    assert b.computed[0] == ("b", 0, 100)


def test_pages_of_other_weights_at_the_same_path_are_not_read_and_of_the_same_at_another_they_are(
    engines: Callable[..., Engine], tmp_path: Path
) -> None:
    a = engines()
    compute(a, "a")
    for engine, first in ((engines(weights=2), 0), (engines(folder=tmp_path / "elsewhere", tp=2), 96)):
        compute(engine, "b")
        assert engine.computed[0] == ("b", first, 100)


def test_tenants_share_nothing(engines: Callable[..., Engine]) -> None:
    a, b = engines(("tenant", "one")), engines(("tenant", "another"))
    compute(a, "a")
    compute(b, "b")
    assert b.computed[0] == ("b", 0, 100)


def test_hybrid_models_and_split_blocks_with_heads_outermost_are_refused(engines: Callable[..., Engine]) -> None:
    with pytest.raises(EngineUnsupported, match="one group of full attention, .*not hybrids"):
        engines(window=17)
    with pytest.raises(EngineUnsupported, match="heads outermost"):
        engines(kernel_tokens=8, layout="LBHNC")


def test_a_prefill_for_others_reads_and_stores_too(engines: Callable[..., Engine]) -> None:
    a, b, c = engines(), engines(), engines()
    compute(a, "a")
    b.ask("p-1", PROMPT, params={"do_remote_decode": True})
    b.finish("p-1")
    assert b.computed[0] == ("p-1", 96, 100)
    c.ask("d-1", PROMPT, 3, b.answers["p-1"])
    c.finish("d-1")
    assert c.said["d-1"] == [1, 1, 1]
    assert c.stats["received_requests"] == 1
    assert c.computed[0] == ("d-1", 99, 100)
    for engine in (b, c):
        engine.drain()
