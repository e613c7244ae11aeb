"""vLLM's requests in the ledger: every prompt token is a hit of a tier or computed, and what was lost has a reason."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
import pytest
from bench import Engine, RequestStatus, Shape, flip
from rich.console import Console

from kvmover.cache.ledger import Loss, PredictionTotals, Predictor, Totals
from kvmover.tools.report.run_summary import report_run
from kvmover.tools.top import show

PROMPT = [7 * n % 900 + 1 for n in range(100)]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines over one store, and close them."""
    made: list[Engine] = []
    root = tmp_path / "store"
    root.mkdir()

    def make(*options: tuple[str, Any], **shape: Any) -> Engine:
        made.append(Engine(Shape(options=(("root", str(root)), *options), **shape), tmp_path / "model"))
        return made[-1]

    yield make
    for engine in made:
        ledger(engine).check()
        assert not ledger(engine).faults, ledger(engine).last_fault
        assert not len(ledger(engine))
        engine.close()


def ledger(engine: Engine) -> Any:
    return engine.scheduler.connector._accounts.ledger


def sums(engine: Engine) -> Totals:
    """Of first attempts."""
    return ledger(engine).total().first


def compute(engine: Engine, name: str, prompt: list[int] = PROMPT, tokens: int = 2) -> None:
    engine.ask(name, prompt, tokens)
    engine.finish(name)
    assert engine.said[name] == [1] * tokens
    engine.drain()


def split(totals: Totals) -> tuple[int, int, int, int, int]:
    return totals.prompt_tokens, totals.device_tokens, totals.host_tokens, totals.storage_tokens, totals.computed_tokens


def test_tokens_are_computed_then_hits_of_the_device_and_of_storage(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines(tp=2)
    compute(a, "first")
    assert split(sums(a)) == (100, 0, 0, 0, 100)
    compute(a, "again")
    assert split(sums(a)) == (200, 96, 0, 0, 104)
    compute(b, "short", [*PROMPT[:32], 3])
    compute(b, "long")
    assert split(sums(b)) == (133, 32, 0, 32 + 64, 5)
    assert sums(a).finished == sums(b).finished == 2


def test_the_last_token_of_a_prompt_of_whole_blocks_is_lost_to_its_logits(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    compute(a, "a", PROMPT[:96])
    compute(b, "b", PROMPT[:96])
    assert split(sums(b)) == (96, 0, 0, 95, 1)
    assert sums(b).lost == {Loss.LAST_TOKEN: 1}


def test_blocks_that_could_not_be_read_are_lost_to_that(engines: Callable[..., Engine], tmp_path: Path) -> None:
    a, b = engines(), engines()
    compute(a, "a")
    for data in (tmp_path / "store").rglob("*.data"):
        flip(data, 3 * 4096 * 4 + 100)  # blocks are 16 KiB here, stored in order
    compute(b, "b")
    assert split(sums(b)) == (100, 0, 0, 48, 52)
    assert sums(b).lost == {Loss.READ_FAILED: 48}
    # Its own inventory had promised all six blocks.
    assert sums(b).predictions == {Predictor.INVENTORY: PredictionTotals(1, foreseen_tokens=48, missed_tokens=48)}


def test_a_preempted_request_has_two_attempts_and_its_prompt_counts_once(engines: Callable[..., Engine]) -> None:
    a = engines(("root", "none"), blocks=13)
    a.ask("older", PROMPT[:47], 40)
    a.ask("younger", PROMPT[::-1], 40)
    preempted = a.scheduler.requests["younger"]
    a.finish("older", "younger")
    a.drain()
    book = ledger(a).total()
    assert book.first.prompt_tokens == 147
    assert preempted.num_preemptions
    assert book.first.retracted + book.again.retracted == preempted.num_preemptions == book.again.attempts
    assert book.again.prompt_tokens == book.again.credited_tokens + book.again.computed_tokens


def test_chunks_of_a_prompt_are_computed_one_by_one_and_never_hits(engines: Callable[..., Engine]) -> None:
    a = engines(batch_tokens=32)
    compute(a, "a")
    assert split(sums(a)) == (100, 0, 0, 0, 100)


def test_an_aborted_request_leaves_what_it_never_reached(engines: Callable[..., Engine]) -> None:
    a = engines(batch_tokens=32)
    a.ask("a", PROMPT)
    a.step()
    a.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    a.drain()
    assert (sums(a).computed_tokens, sums(a).abandoned_tokens, sums(a).aborted) == (32, 68, 1)


def test_a_prompt_that_another_engine_computed_is_in_that_ones_account_alone(engines: Callable[..., Engine]) -> None:
    a, b = engines(("root", "none")), engines(("root", "none"))
    a.ask("p-1", PROMPT, params={"do_remote_decode": True})
    a.finish("p-1")
    b.ask("d-1", PROMPT, 3, a.answers["p-1"])
    b.finish("d-1")
    for each in (a, b):
        each.drain()
    assert split(sums(a)) == (100, 0, 0, 0, 100)
    assert split(sums(b)) == (0, 0, 0, 0, 0)


def test_what_a_router_said_of_a_request_stands_beside_what_it_got(engines: Callable[..., Engine]) -> None:
    a = engines()
    compute(a, "first")
    said = {"kvmover_predicted_tokens": 32, "kvmover_tenant": "gold"}
    a.ask("again", PROMPT, 2, said)
    a.finish("again")
    a.drain()
    assert sums(a).predictions == {
        Predictor.INVENTORY: PredictionTotals(1, 0, 0, 0),
        Predictor.ROUTER: PredictionTotals(1, foreseen_tokens=32, missed_tokens=0, unforeseen_tokens=64),
    }
    assert [group.tenant for group in ledger(a).groups()] == ["", "gold"]


def test_each_account_is_a_line_of_the_run_log(
    engines: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMOVER_RECORD_RUN_LOG", str(tmp_path / "run.jsonl"))
    a = engines(("tenant", "one"))
    compute(a, "a")
    a.scheduler.shutdown()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines() if line]
    (account,) = [line["account"] for line in lines if "account" in line]
    assert (account["request"], account["computed_tokens"]) == ("a", 100)
    out = io.StringIO()
    report_run([tmp_path / "run.jsonl"], None, 1, Console(file=out, width=200))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert any(row[:6] == ["one", a.config.model_config.model, "100", "0", "0", "0"] for row in rows)
    assert any(row[:2] == ["inventory", "1"] for row in rows)


def test_what_it_serves_is_what_top_shows(engines: Callable[..., Engine]) -> None:
    a = engines(("tenant", "one"))
    compute(a, "first")
    compute(a, "again")
    accounts = a.scheduler.connector._accounts
    registry = prometheus.CollectorRegistry()
    registry.register(accounts)
    out = io.StringIO()
    show(["here"], Console(file=out, width=200), get=lambda _: prometheus.generate_latest(registry).decode())
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["device", "96", "48.0%", "96", "48.0%"] in rows
    assert ["computed", "104", "52.0%", "104", "52.0%"] in rows
    (row,) = [row for row in rows if row[:1] == ["one,"]]
    assert row[2:] == ["200", "48.0%", "96", "0", "0", "0", "104", "0", "0"]
    assert ["inventory", "2", "96", "96", "96", "0", "0"] in rows
