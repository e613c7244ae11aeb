"""The page store as a tier of vLLM's own TieringOffloadingManager: what one engine has offloaded, another reads."""

# vLLM is in its engine's own environment, which no type checker looks into.
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_core import by_a_trainers_extension, core_of_manager, flushed, has_sources
from offload_manager import Managed
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvmover.config import ConfigError
from kvmover.engines.vllm.vllm_contract import VLLM
from kvmover.errors import StoreError
from tests.store.segments import segments_of

CacheHitSource = VLLM.find("vllm.v1.metrics.cache_hit_source:CacheHitSource")

CHUNKS, BLOCK_BYTES = 16, 12_000  # a row is padded to 12,288
POISON = 0x6B
PROMPT = [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]

_ids = iter(range(1 << 30))


def config_of(root: Path, *, tp: int = 1, canonical: bool = False, groups: int = 1, **tier: Any) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layers.{n}",), n) for n in range(groups)),
        worker_kv_bytes_per_block=BLOCK_BYTES // tp,
        enable_kv_cache_events=True,
        extra_config={
            "cpu_bytes_to_use": CHUNKS * 12_288,
            "secondary_tiers": [
                {
                    "type": "KvmoverTier",
                    "module_path": "kvmover.engines.vllm",
                    "root": str(root),
                    "upkeep_s": 0.01,
                    "weights": "tiny",
                    **tier,
                }
            ],
        },
        engine_id=f"check-{next(_ids)}-{time.monotonic_ns()}",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, tp, tp, 1, 1, 1, 0, 1, None, canonical),
        canonical_layout=canonical,
        kv_cache_layout="LBNHC",
    )


@dataclass
class Offload(Managed):
    """vLLM's manager over memory of its own, driven as its scheduler does. `memory` [chunk, byte]."""

    config: OffloadingConfig
    events: list[Any] = field(default_factory=list)
    counts: dict[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = TieringOffloadingSpec(self.config)
        self.manager: Any = self.spec.get_manager()
        assert self.spec._scheduler_mmap is not None
        self.memory[:] = POISON

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        region: Any = self.spec._scheduler_mmap
        return region.base_tensor.numpy().view(np.uint8).reshape(CHUNKS, -1)

    def step(self) -> None:
        super().step()
        self.events += self.manager.take_events()

    def told(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        for labels, value in values.items() if name.startswith("vllm:kvmover_tier") else ():
            key = (name.rpartition("_")[2], labels[0])
            self.counts[key] = self.counts.get(key, 0) + value

    def compute(self, keys: Sequence[OffloadKey]) -> None:
        """A request whose chunks come from the device: chunk n is full of its key's first byte."""
        context = ReqContext(f"computes-{next(_ids)}")
        self.manager.on_new_request(context)
        placed = self.manager.prepare_store(keys, context)
        for key, row in zip(placed.keys_to_store, placed.store_spec.chunk_ids, strict=True):
            self.memory[row, :BLOCK_BYTES] = key[0] + 1
        self.manager.complete_store(placed.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.finish()

    def ask(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """What each chunk is full of once vLLM has it for a request; None for a miss."""
        context = ReqContext(f"asks-{next(_ids)}")
        self.manager.on_new_request(context)
        found = dict.fromkeys(keys, LookupResult.RETRY)
        stop = time.monotonic() + 60
        while any(result in (LookupResult.RETRY, LookupResult.HIT_PENDING) for result in found.values()):
            assert time.monotonic() < stop
            found = {key: self.manager.lookup(key, context) for key in keys}
            self.step()
            time.sleep(0.001)
        hits = [key for key in keys if found[key] is LookupResult.HIT]
        rows = self.manager.prepare_load(hits, context).chunk_ids if hits else ()
        held = {key: self.memory[row, :BLOCK_BYTES].copy() for key, row in zip(hits, rows, strict=True)}
        if has_sources(self.manager):
            self.sources = {key: self.manager.get_load_source(key, context) for key in hits}
        self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        self.finish()
        for content in held.values():
            assert (content == content[0]).all()
        return [int(held[key][0]) if key in held else None for key in keys]

    def forget(self) -> None:
        """The host's memory is empty, as after `reset_prefix_cache`."""
        self.manager.reset_cache()
        flushed(self.manager)
        self.memory[:] = POISON

    def close(self) -> None:
        self.manager.shutdown()


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[Callable[..., Offload]]:
    """Make engines' offloading over one directory, and end it."""
    made: list[Offload] = []
    root = tmp_path / "store"
    root.mkdir()

    def make(**options: Any) -> Offload:
        made.append(Offload(config_of(root, **options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


WHOLE = [1, 2, 3, 4, 5, 6]


def test_chunks_outlive_the_engine_that_offloaded_them(offload: Callable[..., Offload]) -> None:
    first = offload()
    first.compute(PROMPT)
    assert first.counts == {("stores", "written"): 6}
    first.close()
    again = offload()
    assert again.ask(PROMPT) == WHOLE
    assert not has_sources(again.manager) or set(again.sources.values()) == {CacheHitSource.DISK}
    assert again.counts == {("loads", "read"): 6}


def test_chunks_are_read_while_the_engine_that_wrote_them_runs(offload: Callable[..., Offload]) -> None:
    first, second = offload(), offload()
    assert second.ask(PROMPT) == [None] * 6
    first.compute(PROMPT)
    assert second.ask(PROMPT) == WHOLE


def test_the_host_asks_the_store_for_nothing_that_it_has(offload: Callable[..., Offload]) -> None:
    engine = offload()
    engine.compute(PROMPT)
    assert engine.ask(PROMPT) == WHOLE
    assert ("loads", "read") not in engine.counts
    engine.forget()
    assert engine.ask(PROMPT) == WHOLE
    assert engine.counts["loads", "read"] == 6


def test_what_is_stored_is_not_written_again(offload: Callable[..., Offload]) -> None:
    first, second = offload(), offload()
    first.compute(PROMPT)
    second.compute(PROMPT)
    assert second.counts == {("stores", "present"): 6}


def test_chunks_are_shared_by_the_version_of_weights_that_were_updated_and_by_nobody_without_one(
    offload: Callable[..., Offload],
) -> None:
    first, second, other = offload(), offload(), offload()
    first.compute(PROMPT)
    cores = [core_of_manager(engine.config.engine_id, engine.manager) for engine in (first, second)]
    cores[0].collective_rpc(by_a_trainers_extension)
    first.forget()
    assert first.ask(PROMPT) == [None] * 6
    first.compute(PROMPT)
    assert first.counts == {("stores", "written"): 6, ("stores", "failed"): 6}
    cores[0].set_weight_version("7")
    assert first.ask(PROMPT) == [None] * 6
    first.compute(PROMPT)
    assert first.counts["stores", "written"] == 12
    cores[1].collective_rpc(by_a_trainers_extension)
    cores[1].set_weight_version("7")
    assert second.ask(PROMPT) == WHOLE
    assert other.ask(PROMPT) == WHOLE  # of the start


def test_a_version_of_the_weights_counts_when_no_chunk_of_before_is_under_way(offload: Callable[..., Offload]) -> None:
    engine = offload()
    (tier,) = engine.manager.secondary_tiers
    core, start = core_of_manager(engine.config.engine_id, engine.manager), tier._store_tier.space
    core.collective_rpc(by_a_trainers_extension)
    context = ReqContext("before")
    engine.manager.on_new_request(context)
    placed = engine.manager.prepare_store(PROMPT, context)
    engine.manager.complete_store(placed.keys_to_store, context)
    core.set_weight_version("7")
    assert tier._store_tier.space == start
    engine.manager.on_request_finished(context)
    engine.finish()
    core.post_step(True)
    assert tier._store_tier.space != start
    assert engine.ask(PROMPT) == [None] * 6


def test_groups_of_a_hybrid_keep_their_chunks_of_one_hash_apart(offload: Callable[..., Offload]) -> None:
    first, second = offload(groups=2), offload(groups=2)
    keys = [make_offload_key(bytes([number]) * 32, group) for group, number in ((0, 1), (1, 1), (1, 2))]
    first.compute(keys[:1])
    assert second.ask(keys) == [2, None, None]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ({}, {"tp": 2}),
        ({"weights": "a"}, {"weights": "b"}),
        ({"tenant": "a"}, {}),
        ({}, {"groups": 2}),
        ({"canonical": True}, {}),
    ],
    ids=["tp", "weights", "tenant", "groups", "canonical"],
)
def test_bytes_that_mean_something_else_are_no_hit(
    offload: Callable[..., Offload], writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    offload(**writer).compute(PROMPT)
    assert offload(**reader).ask(PROMPT) == [None] * 6
    assert offload(**writer).ask(PROMPT) == WHOLE


def test_the_canonical_layout_is_read_by_another_tp(offload: Callable[..., Offload]) -> None:
    offload(canonical=True).compute(PROMPT)
    assert offload(canonical=True, tp=2).ask(PROMPT) == WHOLE


def test_a_damaged_chunk_is_a_miss_that_costs_no_other(offload: Callable[..., Offload], tmp_path: Path) -> None:
    first, second = offload(), offload()
    first.compute(PROMPT)
    for data in (tmp_path / "store").rglob("*.data"):
        content = data.read_bytes()
        at = content.index(bytes([3]) * 64) + 5_000
        # In place: a file that is written anew is empty for a moment, and that may be when another engine looks at it.
        with data.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 1]))
    assert second.ask(PROMPT) == [1, 2, None, 4, 5, 6]
    assert second.counts == {("loads", "read"): 5, ("loads", "poisoned"): 1}
    second.compute(PROMPT[2:3])
    second.forget()
    assert second.ask(PROMPT) == WHOLE


def test_a_store_that_is_gone_costs_misses_and_nothing_else(offload: Callable[..., Offload], tmp_path: Path) -> None:
    engine = offload()
    engine.compute(PROMPT[:3])
    shutil.rmtree(tmp_path / "store")
    engine.forget()
    answers = engine.ask(PROMPT)
    assert all(answer in (None, number + 1) for number, answer in enumerate(answers))
    engine.compute(PROMPT[3:])
    assert engine.ask(PROMPT[3:]) == WHOLE[3:]  # from the host


def test_a_slow_store_does_not_pin_the_host(offload: Callable[..., Offload]) -> None:
    engine = offload()
    (tier,) = engine.manager.secondary_tiers
    context = ReqContext("fast")
    engine.manager.on_new_request(context)
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(10)]
    with segments_of(tier._store_tier.store).writing:  # a disk that takes its time
        for key in keys:
            placed = engine.manager.prepare_store([key], context)
            engine.memory[placed.store_spec.chunk_ids[0], :BLOCK_BYTES] = key[0] + 1
            engine.manager.complete_store([key], context)
            engine.step()
        engine.step()
        # A quarter of 16 chunks wait, all others are the host's again.
        assert engine.counts == {("stores", "dropped"): 6}
        assert len(engine.manager._jobs) == 4
    engine.manager.on_request_finished(context)
    engine.finish()
    assert engine.counts == {("stores", "dropped"): 6, ("stores", "written"): 4}


def test_what_was_submitted_is_stored_before_the_end(offload: Callable[..., Offload]) -> None:
    engine = offload()
    context = ReqContext("last")
    engine.manager.on_new_request(context)
    placed = engine.manager.prepare_store(PROMPT[:4], context)
    for key, row in zip(placed.keys_to_store, placed.store_spec.chunk_ids, strict=True):
        engine.memory[row, :BLOCK_BYTES] = key[0] + 1
    engine.manager.complete_store(placed.keys_to_store, context)
    engine.close()
    assert offload().ask(PROMPT) == [*WHOLE[:4], None, None]


def test_what_vllm_uses_on_the_device_stays_in_the_store(offload: Callable[..., Offload]) -> None:
    """Room for eight chunks of 12,288 bytes: of the oldest four, the touched two outlive what comes."""
    engine = offload(quota_bytes=8 * 12_288)
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(20)]
    engine.compute(keys[:4])
    (tier,) = engine.manager.secondary_tiers
    engine.manager.touch(keys[:2], ReqContext("hits"))
    stop = time.monotonic() + 60
    while tier._store_tier._touched:
        assert time.monotonic() < stop
        time.sleep(0.001)
    for key in keys[4:10]:
        engine.compute([key])
    assert offload().ask(keys[:4]) == [1, 2, None, None]


def test_stored_chunks_are_announced_where_vllm_is_asked_to(offload: Callable[..., Offload]) -> None:
    tells, silent = offload(enable_kv_events=True, locality="REMOTE"), offload(tenant="other")
    for engine in (tells, silent):
        engine.compute(PROMPT)
    (event,) = [event for event in tells.events if event.medium is Medium.STORAGE]
    assert list(event.keys) == PROMPT
    assert not event.removed
    assert event.locality.value == "REMOTE"
    assert not [event for event in silent.events if event.medium is Medium.STORAGE]


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"rooot": "x"}, ConfigError, "rooot"),
        ({"locality": "NEAR"}, ConfigError, "NEAR"),
        ({"root": None}, ConfigError, "store.root"),
        ({"root": "/dev/null"}, StoreError, "/dev/null"),
    ],
    ids=["unknown", "locality", "none", "no directory"],
)
def test_options_that_cannot_be_end_the_start(
    options: dict[str, Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    (tier,) = config.extra_config["secondary_tiers"]
    with pytest.raises(error, match=named):
        TieringOffloadingSpec(
            replace(config, extra_config={**config.extra_config, "secondary_tiers": [{**tier, **options}]})
        ).get_manager()
