"""Namespaces that nobody uses any more, of weights that were replaced, give their space back."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover import cli
from kvmover.config.settings import ConfigError, StoreSettings
from kvmover.engines.common.store import Upkeep
from kvmover.store import Namespace, PagePart, PageStore, Policy, clear_unused

WHOLE = PagePart.whole(GQA, PAGE)
OLD, OTHER = Namespace("llama", "rev-0", PAGE), Namespace("mistral", "7", PAGE)
DAY_S = 86_400


def fill(root: Path | str, space: Namespace) -> None:
    with PageStore.open(root, space) as store:
        assert all(r.ok for r in Rank(store, WHOLE, namespace=space).put(pages_of(4)))
        store.flush()


def age(root: Path, space: Namespace, seconds: float) -> None:
    """Nobody has touched the namespace for so long."""
    for path in (root / space.folder).iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def held(root: Path, space: Namespace) -> int:
    return sum(path.stat().st_size for path in (root / space.folder).iterdir() if path.suffix in (".head", ".data"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for space in (OLD, SPACE, OTHER):
        fill(tmp_path, space)
        age(tmp_path, space, 10 * DAY_S)
    return tmp_path


def test_what_nobody_used_for_long_is_emptied_and_nothing_else(root: Path) -> None:
    age(root, OTHER, 2 * DAY_S)
    assert [each.name for each in clear_unused(root, 7 * DAY_S, SPACE.folder)] == [OLD.folder]
    assert held(root, OLD) == 0
    assert held(root, SPACE) > 0 < held(root, OTHER)
    assert clear_unused(root, 7 * DAY_S, SPACE.folder) == []
    fill(root, OLD)  # it is as new for who comes back
    with PageStore.open(root, OLD) as store:
        assert all(r.ok for r in Rank(store, WHOLE, namespace=OLD).get(pages_of(4)))


@pytest.mark.parametrize("use", ["open", "read", "write"])
def test_who_opens_reads_or_writes_a_namespace_keeps_it(root: Path, use: str) -> None:
    if use == "open":
        PageStore.open(root, OLD).close()
    else:
        with PageStore.open(root, OLD, Policy(stamp_s=0)) as store:
            age(root, OLD, 10 * DAY_S)
            rank = Rank(store, WHOLE, namespace=OLD)
            rank.get(pages_of(1)) if use == "read" else rank.put(pages_of(1, "new"))
            store.collect()
    assert [each.name for each in clear_unused(root, 7 * DAY_S)] == [SPACE.folder, OTHER.folder]
    assert held(root, OLD) > 0


def test_an_idle_process_that_may_write_keeps_its_namespace(root: Path) -> None:
    with PageStore.open(root, OLD) as store:
        rank = Rank(store, WHOLE, namespace=OLD)
        rank.put(pages_of(2, "mine"))
        age(root, OLD, 10 * DAY_S)
        assert OLD.folder not in [each.name for each in clear_unused(root, 7 * DAY_S)]
        assert all(r.ok for r in rank.get(pages_of(2, "mine")))


def test_a_process_that_only_read_lately_loses_hits_and_no_more(root: Path) -> None:
    with PageStore.open(root, OLD) as store:
        rank = Rank(store, WHOLE, namespace=OLD)
        assert rank.exists(pages_of(4)) == [True] * 4
        age(root, OLD, 10 * DAY_S)
        clear_unused(root, 7 * DAY_S)
        assert not any(r.ok for r in rank.get(pages_of(4)))
        assert all(r.ok for r in rank.put(pages_of(4)))
        assert all(r.ok for r in rank.get(pages_of(4)))
        assert not store.counters.poisoned


def test_a_clock_that_is_ahead_empties_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for space in (OLD, SPACE, OTHER):
        age(root, space, 0)
    now_s = time.time() + 30 * DAY_S
    monkeypatch.setattr(time, "time", lambda: now_s)
    assert clear_unused(root, 7 * DAY_S) == []


def test_the_upkeep_of_an_engine_empties_them_and_spares_its_own(root: Path) -> None:
    settings = StoreSettings(root=root, namespace_ttl_s=0.01)
    with PageStore.open(root, SPACE) as store:
        age(root, SPACE, 10 * DAY_S)
        upkeep = Upkeep(store, settings)
        while held(root, OLD) or held(root, OTHER):
            time.sleep(0.01)
        upkeep.close()
        assert held(root, SPACE) > 0
    with pytest.raises(ConfigError, match="namespace_ttl_s = 0"):
        StoreSettings(namespace_ttl_s=0)


def test_the_command_empties_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(root, OTHER)
    with pytest.raises(SystemExit) as end:
        cli.main(["store", "gc", str(root), "--namespace-ttl", str(7 * DAY_S), "--json"])
    assert not end.value.code
    rows = {(row["model"], row["weights"]): row["pages"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {("llama", "rev-0"): 0, ("llama", "rev-1"): 0, ("mistral", "7"): 4}


def test_a_bucket_is_emptied_of_them_too(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bucket, OLD)
    time.sleep(1.1)  # the service counts seconds
    fill(bucket, SPACE)
    assert clear_unused(bucket, DAY_S) == []
    assert [each.name for each in clear_unused(bucket, 0.5, SPACE.folder)] == [OLD.folder]
    for space, pages in ((OLD, 0), (SPACE, 4)):
        with PageStore.open(bucket, space) as store:
            assert store.stat().pages == pages
