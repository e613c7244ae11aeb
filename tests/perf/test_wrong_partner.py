"""The table of wrong partners: a row for each mistake, beside what the engine's own connector answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf import hybrid_connectors, readme, record, trained_models, wrong_partner
from tests.live import partners
from tests.live.answers import Answer
from tests.live.table import Results, Row

WHAT = "KV of a longer prompt"


def answer(*tokens: int) -> Answer:
    return Answer(200, 0.1, tokens, tuple(-0.5 for _ in tokens))


RIGHT, WRONG, REFUSED, SILENT = answer(1, 2), answer(1, 3), Answer(500, 0.1), Answer(0, 15.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of a run that made one mistake under two policies, and another in the other engine."""
    results = Results([Row("vllm", "a pair", 20, 20, 0, 0, 0.0, 1, 2)])
    said = "a|b is computed here"
    partners.mistake(results, "vllm", f"{WHAT}, policy fail", [RIGHT] * 2, [REFUSED] * 2, lambda: [RIGHT] * 2, said)
    partners.mistake(results, "vllm", f"{WHAT}, policy recompute", [RIGHT] * 2, [RIGHT] * 2, lambda: [RIGHT] * 2, said)
    partners.mistake(results, "sglang", WHAT, [RIGHT], [REFUSED], lambda: [RIGHT], "the KV is of 300 tokens")
    results.keep([], tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for module in (record, readme, wrong_partner, hybrid_connectors, trained_models):
        monkeypatch.setattr(module, "RESULTS", tmp_path, raising=False)
    monkeypatch.setattr(record.read, "__defaults__", (tmp_path,))
    monkeypatch.setattr(record.passed, "__defaults__", (tmp_path,))
    monkeypatch.setattr(record.replace, "__defaults__", (tmp_path,))
    monkeypatch.setattr(record.write, "__defaults__", (tmp_path,))
    return tmp_path


def rows() -> list[list[str]]:
    table = [line for line in readme.scenarios().splitlines() if line.startswith(f"| {WHAT}")]
    return [line.replace(r"\|", "/").strip("| ").split(" | ") for line in table]


@pytest.mark.usefixtures("folder")
def test_a_mistake_is_a_row_of_a_table_of_its_own_and_none_of_the_scenarios() -> None:
    first, second, other = rows()
    assert first[:7] == [f"{WHAT}, policy fail", "vLLM", "2", "0", "0", "2", "0 of 2"]
    assert second[:7] == [f"{WHAT}, policy recompute", "vLLM", "2", "0", "2", "0", "0 of 2"]
    assert other[:7] == [WHAT, "SGLang", "1", "0", "0", "1", "0 of 1"]
    assert first[7:] == ["a/b is computed here", "not run"]
    page = readme.scenarios()
    assert "1 in vLLM and 1 in SGLang: 10 requests" in page
    assert wrong_partner.WRONG_PARTNER not in page
    assert page.count("| a pair |") == 1


@pytest.mark.usefixtures("folder")
def test_wrong_answers_of_the_engines_own_connector_stand_beside_it_and_fail_nothing() -> None:
    every = [RIGHT, WRONG, REFUSED, SILENT]
    assert partners.theirs("vllm", "NixlConnector", WHAT, [RIGHT] * 4, every, lambda: [WRONG, WRONG, RIGHT, RIGHT], 15)
    first, second, other = rows()
    told = "NixlConnector: 1 right, 1 wrong, 1 refused, 1 without an answer within 15 s; then 2 of 4 wrong"
    assert first[8] == second[8] == told
    assert other[8] == "not run"
    assert not partners.theirs("sglang", "nixl", WHAT, [RIGHT], [RIGHT], lambda: [SILENT], 15)
    assert partners.theirs("vllm", "NixlConnector", WHAT, [RIGHT], [RIGHT], lambda: [RIGHT], 15)
    first, _, other = rows()
    assert first[8] == "NixlConnector: 1 right; then all right"
    assert other[8] == "nixl: 1 right; then 1 of 1 failed"
    partners.has_none("sglang", "nixl", [WHAT], "it has no keys")
    first, _, other = rows()
    assert first[8] == "NixlConnector: 1 right; then all right"
    assert other[8] == "nixl: it has no keys"


def test_a_run_without_mistakes_has_no_such_table(folder: Path) -> None:
    (folder / "live.csv").unlink()
    Results([Row("vllm", "a pair", 20, 20, 0, 0, 0.0, 1, 2)]).keep([], folder)
    assert "Wrong partner" not in readme.scenarios()


def test_every_mistake_of_the_last_run_has_its_sentence_and_no_wrong_token() -> None:
    kept: list[Any] = [row for row in record.passed("live") if row["scenario"].startswith(wrong_partner.WRONG_PARTNER)]
    assert not [row["scenario"] for row in kept if row["wrong"] != "0"]
    made = wrong_partner.mistakes(kept)
    assert not {engine: sorted(names) for engine, names in made.items() if len(names) < 12}
    assert all(row["said"] for row in kept if not row["scenario"].endswith(wrong_partner.AFTERWARDS))


def test_a_wrong_token_through_kvmover_ends_the_run() -> None:
    with pytest.raises(AssertionError, match="wrong partner"):
        partners.mistake(Results(), "vllm", WHAT, [RIGHT], [WRONG], lambda: [RIGHT], "")
    with pytest.raises(AssertionError, match="the same prompts alone"):
        partners.mistake(Results(), "vllm", WHAT, [RIGHT], [RIGHT], lambda: [WRONG], "")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "(EngineCore pid=1) WARNING 11-24 19:14:00 [scheduler.py:408] cmpl-1 is computed here: the KV is of 3"
            " tokens 000102030405060708090a0b0c0d0e0f",
            "cmpl-1 is computed here: the KV is of 3 tokens 000102...",
        ),
        (
            "[2026-11-24 19:14:00] Decode transfer failed for request rank=0 with exception"
            " KVTransferError(bootstrap_room=98): peer holds weights d9d1083e08ec of /some/where/a-model (kv auto)",
            "peer holds weights d9d1083e08ec of .../a-model (kv auto)",
        ),
        ("http://127.0.0.1:99/kvmover/cards gave 6x2x4/8", "http://127.0.0.1:99/kvmover/cards gave 6x2x4/8"),
    ],
)
def test_a_sentence_is_kvmovers_own_without_digests_and_folders(line: str, told: str) -> None:
    assert partners.legible(line) == told
