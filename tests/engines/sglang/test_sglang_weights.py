"""Updates of SGLang's weights: what its calls mean, and what goes by the weights after them. Without SGLang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sglang_backends import HASHES, PAGE, adapter, host_pool, raw, tokens_of

from kvmover.engines.common import NO_VERSION, UPDATED, ServedWeights
from kvmover.engines.sglang.page_parts import MAIN
from kvmover.engines.sglang.pd_driver import TransferDriver, Wanted
from kvmover.engines.sglang.sglang_weight_updates import BEING_UPDATED, UNFLUSHED, UPDATES, UpdateHooks, WeightUpdates
from kvmover.errors import StoreError
from kvmover.transfer import Gate, Pace
from kvmover.transfer.protocol.handshake import Model
from tests.transfer.mover_fleets import Pair

STARTED = ServedWeights("llama", "ab")
PACE = Pace(share=0.5, shortest_s=0.001, open_s=0.001, idle_s=0.001)


class Engine:
    """SGLang's scheduler and its updater, as far as the hooks see them: its methods call each other through these."""

    def __init__(self, *lacking: str) -> None:
        """`lacking`: methods that this release has not."""
        self.updates, self.heard = WeightUpdates(), list[ServedWeights]()
        self.updates.follow(self)
        around = UpdateHooks.of(self.updates, lambda name: not name.endswith(lacking))
        self.hooks = {name.rpartition(".")[2]: hook for name, hook in around.items()}
        self.is_idle, self.fails, self._session, self.draft_worker = True, False, None, None

    def reweigh(self) -> None:
        self.heard.append(self.updates.current(STARTED))

    def call(self, name: str, real: Callable[..., Any], *given: Any, **options: Any) -> Any:
        return self.hooks[name](real, self, *given, **options)

    def flush(self) -> bool:
        return self.call("flush_cache", lambda *_, **__: self.is_idle, empty_cache=True)

    def name(self, version: str | None) -> None:
        if "record_weight_version_change" in self.hooks:
            self.call("record_weight_version_change", lambda *_, **__: None, new_version=version)

    def update(self, kind: str, version: str | None = None, flushes: bool = True) -> bool:
        """As `update_weights_from_...`: the version is recorded where it succeeds, and the cache is flushed then."""

        def update(_: Any, request: Any) -> Any:
            if self.fails:
                return SimpleNamespace(success=False)
            self.name(request.version)
            return SimpleNamespace(success=not flushes or self.flush())

        return self.call(f"update_weights_from_{kind}", update, SimpleNamespace(version=version)).success

    def session(self, name: str) -> None:
        self._session = True if name == "begin" else None
        self.call(f"{name}_weight_update", lambda *_: SimpleNamespace(success=True), None)

    @property
    def told(self) -> list[str]:
        """Each change that was heard since the last look: the identity, or why there is none that others have."""
        heard, self.heard[:] = list(self.heard), []
        return [weights.unknown or weights.identity for weights in heard]


@pytest.mark.parametrize("kind", ["disk", "ipc"])
def test_an_update_with_a_version_is_told_once_and_one_without_is_nobodys(kind: str) -> None:
    engine = Engine()
    assert engine.update(kind, "7")
    assert engine.told == ["ab, version 7"]
    assert engine.update(kind)
    assert engine.told == [NO_VERSION]
    engine.name("8")
    assert engine.told == ["ab, version 8"]
    assert engine.update(kind, "8")
    assert engine.told == ["ab, version 8"], "what was open ends, also where the caller says nothing new"


@pytest.mark.parametrize("kind", ["disk", "ipc", "tensor"])
def test_an_update_is_nobodys_in_a_release_that_records_no_version(kind: str) -> None:
    engine = Engine("record_weight_version_change", "begin_weight_update", "end_weight_update")
    assert {name for name in engine.hooks if name.endswith("_weight_update")} == set()
    assert engine.update(kind, "7")
    assert engine.told == [NO_VERSION]


@pytest.mark.parametrize(("is_idle", "flushes"), [(False, True), (True, False)])
def test_what_is_left_in_the_cache_keeps_the_version_back_until_it_is_flushed(is_idle: bool, flushes: bool) -> None:
    engine = Engine()
    engine.is_idle = is_idle
    engine.update("disk", "7", flushes)
    assert engine.told == [UNFLUSHED]
    engine.is_idle = False
    assert not engine.flush()
    assert engine.told == []
    engine.is_idle = True
    assert engine.flush()
    assert engine.told == ["ab, version 7"]
    assert engine.flush()
    assert engine.told == []


def test_a_session_is_nobodys_until_it_ends_with_the_last_version_that_was_said() -> None:
    engine = Engine()
    engine.session("begin")
    assert engine.told == [BEING_UPDATED]
    for kind, version, flushes in (("tensor", "7", False), ("distributed", None, False), ("tensor", None, True)):
        engine.update(kind, version, flushes)
        assert set(engine.told) == {BEING_UPDATED}
    engine.session("end")
    assert engine.told == ["ab, version 7"]
    engine.session("begin")
    engine.session("end")  # others wrote into this process's memory
    assert engine.told == [BEING_UPDATED, NO_VERSION]
    engine.name("8")
    assert engine.told == [UNFLUSHED]
    engine.flush()
    assert engine.told == ["ab, version 8"]


def test_an_update_that_fails_leaves_nobodys_weights_but_where_sglang_rolled_them_back() -> None:
    engine = Engine()
    engine.fails = True
    assert not engine.update("disk", "7")
    assert not engine.update("tensor", "7")  # without a session
    assert engine.told == []
    engine.draft_worker = object()
    assert not engine.update("disk", "7")
    assert engine.told == [NO_VERSION]
    assert not engine.update("ipc", "7")
    assert engine.told == [NO_VERSION]


def test_an_update_that_raises_leaves_nobodys_weights() -> None:
    engine = Engine()

    def broken(*_: Any) -> Any:
        raise NotImplementedError("load_format")

    with pytest.raises(NotImplementedError):
        engine.call("update_weights_from_ipc", broken, None)
    assert engine.told == [NO_VERSION]


@pytest.mark.parametrize("error", [StoreError("no room"), OSError("no way to the bootstrap server")], ids=repr)
def test_who_cannot_go_on_keeps_nobody_from_it(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def reweigh(self) -> None:
            raise error

    engine = Engine()
    engine.updates._followers.insert(0, Broken())
    engine.update("disk", "7")
    assert engine.told == ["ab, version 7"]
    assert "Broken shares nothing since the weights were updated" in caplog.text
    engine.updates.leave(engine)
    engine.update("disk", "8")
    assert engine.told == []


@pytest.fixture
def updates() -> Any:
    """Those of this process, as a process begins."""
    fresh = WeightUpdates()
    for name in ("version", "is_changed", "is_stale", "is_open", "loads"):
        setattr(UPDATES, name, getattr(fresh, name))
    yield UPDATES
    for name in ("version", "is_changed", "is_stale", "is_open", "loads"):
        setattr(UPDATES, name, getattr(fresh, name))


def test_pages_of_the_weights_before_are_not_found_and_pages_under_way_land_nowhere(
    updates: WeightUpdates, tmp_path: Path
) -> None:
    pool, opened = host_pool("MHATokenToKVPoolHost", "page_first"), adapter(tmp_path)
    with opened.store:
        backends = [opened.backend(pool, MAIN)]
        assert backends[0].put(HASHES[:3], tokens_of([0, 1, 2])) == [True] * 3
        contents = {None: raw(pool).clone()}
        for version in ("7", None, "8"):
            updates.loaded(version)
            updates.flushed()
            opened.reweigh()
            backends.append(backends[-1].moved(opened.store, opened.space))
            raw(pool).random_()
            contents[version] = raw(pool).clone()
            assert not any(backends[-1].exists(HASHES[:3]))
            assert backends[-1].put(HASHES[:3], tokens_of([0, 1, 2])) == [version is not None] * 3
            assert not any(backends[-2].put(HASHES[3:5], tokens_of([3, 4])))
            assert not any(backends[-1].exists(HASHES[3:5]))
        assert {each.name for each in tmp_path.iterdir()} == {
            weights.namespace(PAGE, "").folder for weights in (adapter_weights(), *map(adapter_weights().updated, "78"))
        }
        updates.named("7")
        opened.reweigh()
        raw(pool).zero_()
        assert backends[0].moved(opened.store, opened.space).get(HASHES[:3], tokens_of([0, 1, 2])) == [True] * 3
        read = raw(pool).reshape(2, -1)[:, : raw(pool).numel() * 3 // 14]
        assert torch.equal(read, contents["7"].reshape(2, -1)[:, : read.shape[1]])


def adapter_weights() -> ServedWeights:
    return ServedWeights("m", "1")


def test_a_rank_joins_again_when_its_requests_have_ended_for_the_reason_and_meets_who_has_the_version() -> None:
    pair, over = Pair.of(), list[tuple[str, int, str | None]]()
    lost, stop = list[str](), threading.Event()
    src, dst = (
        TransferDriver(
            engine.movers[0],
            lambda room, reason, _, side=side: over.append((side, room, reason)),
            PACE,
            lost=lambda engine: lost.append(engine),
        )
        for side, engine in (("prefill", pair.src), ("decode", pair.dst))
    )

    def turn(driver: TransferDriver) -> None:
        while not stop.is_set():
            stop.wait(min(driver.turn(), 0.001))

    threads = [threading.Thread(target=turn, args=(driver,)) for driver in (src, dst)]
    for thread in threads:
        thread.start()
    try:
        dst.receive(7, Wanted(lambda: "prefill", range(pair.tokens), pair.dst_tables[0], 0, 1e9))
        src.send(8, pair.src_tables[0], [Gate(None)], b"first")
        until(lambda: bool(src.waiting(7)))
        model = Model("toy", pair.bench.components, "ab, version 7")
        src.rejoin(lambda: pair.bench.transport("prefill again"), model, UPDATED)
        until(lambda: len(over) == 2)
        assert {(side, room) for side, room, _ in over} == {("decode", 7), ("prefill", 8)}
        assert all(UPDATED in str(reason) for _, _, reason in over)
        until(lambda: lost == ["prefill"])
        dst.rejoin(lambda: pair.bench.transport("decode again"), model, UPDATED)
        over.clear()
        dst.connect(src.mover.card)
        dst.receive(9, Wanted(lambda: "prefill", range(pair.tokens), pair.dst_tables[0], 0, 1e9))
        src.send(9, pair.src_tables[0], [Gate(None)], b"first")
        until(lambda: len(over) == 2)
        assert sorted(over) == [("decode", 9, None), ("prefill", 9, None)]
        pair.assert_landed()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    waits = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if is_so():
            return
        waits.wait(0.005)
    raise AssertionError("it did not come to that")
