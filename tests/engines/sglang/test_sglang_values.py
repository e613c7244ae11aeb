"""What the SGLang adapters decide, without SGLang: options, releases, parts of a page, restorable prefixes."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from kvmover.cache.prefix import Tiers, WriteBack, WriteThrough
from kvmover.cache.tiers import BestEffort, Prefetch, Store, Timeout, Wait
from kvmover.config import ConfigError
from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.engines.sglang.page_parts import ALL_PAGES, PoolRows, TpPlacement, hits, native_part, part_of_rows
from kvmover.engines.sglang.sglang_options import (
    ModelFacts,
    ObjectKind,
    PoolSize,
    StorageFlags,
    StoreOptions,
    TierFlags,
    parse,
    said,
)
from kvmover.errors import LayoutError
from kvmover.layout import CpOrder, Fleet
from kvmover.store import PagePart

ATTENTION = PoolRows("kv", layers=8, kv=2, heads=2, dim=128, dtype="bfloat16")


@pytest.mark.parametrize(
    "name", ["sglang.device_indices", "sglang.page_parts", "sglang.sglang_options", "common.parallel_rank"]
)
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    found = doctest.testmod(import_module(f"kvmover.engines.{name}"))
    assert found.attempted
    assert not found.failed


def test_asking_the_package_for_a_class_without_the_engine_says_so_in_one_sentence() -> None:
    package = import_module("kvmover.engines.sglang")
    with pytest.raises(EngineUnsupported, match=r"^sglang is not installed; kvmover\S+ is loaded by SGLang$"):
        assert package.KvmoverStore


def test_the_engines_own_keys_are_not_options() -> None:
    mine = {"root": "/kv", "quota_bytes": 1 << 40, "objects": "native"}
    plug = {"backend_name": "kvmover", "module_path": "m", "class_name": "c", "interface_v1": 1, "allocator": "shm"}
    options, settings = parse(mine | plug)
    assert options == StoreOptions(objects=ObjectKind.NATIVE)
    assert (settings.store.root, settings.store.quota_bytes) == (Path("/kv"), 1 << 40)


@pytest.mark.parametrize(
    ("mistake", "word"),
    [
        ({"root": 1}, "root"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"upkeep_s": 0}, "upkeep_s"),
        ({"layers": 1.5}, "layers"),
        ({"quota": 1}, "quota"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(mistake: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=f"page store in SGLang: .*{word}"):
        parse({"root": "/kv", **mistake})


def test_a_root_has_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"here or as store.root \(KVMOVER_STORE_ROOT\)"):
        parse(None)


def test_the_operator_is_believed_before_the_engine() -> None:
    engine = ModelFacts(kv_heads=8, layers=32, kv_dtype="fp8_e4m3")
    assert said(StoreOptions(), engine) == engine
    assert said(StoreOptions(kv_heads=4), engine) == ModelFacts(4, 32, "fp8_e4m3")


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 4])
def test_every_ranks_part_is_its_fleets_share_of_the_model(heads: int, tp: int, pp: int, cp: int) -> None:
    """The same part as `Part.of` gives, where SGLang cuts layers evenly; and nobody has to say what can be counted.

    Layers, heads and positions are from one coordinate (sglang#22782).
    """
    fleet = Fleet(tp=tp, pp=pp, cp=cp, page_tokens=16 // cp, cp_order=CpOrder.TOKEN)
    for rank in range(fleet.size):
        at = fleet.coordinate(rank)
        model = ModelFacts(kv_heads=heads if heads < tp else None, layers=8 if pp > 1 else None)
        rows = PoolRows("kv", 8 // pp, 2, max(1, heads // tp), 128, "bfloat16", first_layer=at.pp * 8 // pp)
        part = part_of_rows(rows, ParallelRank(at.tp, tp, at.pp, pp, at.cp, cp, CpOrder.TOKEN), model, 16)
        assert part == PagePart.of(part.component, fleet.shard(part.component, rank, 16), 16)
        assert (part.component.heads, part.component.layers) == (heads, 8)


def test_a_fleet_that_knows_its_heads_shares_no_key_with_one_that_does_not() -> None:
    """One head on each of 8 ranks: 8 heads, or 4 that are held twice."""
    rows, place = PoolRows("kv", 8, 2, 1, 128, "bfloat16"), ParallelRank(3, 8)
    unknown, known = (
        part_of_rows(rows, place, model, 16).component for model in (ModelFacts(), ModelFacts(kv_heads=4))
    )
    assert (unknown.heads, known.heads) == (8, 4)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"name": "swa"},
        {"dim": 64},
        {"layers": 4},
        {"drafts": 1},
        {"kv": 1},
        {"states": 1},
    ],
    ids=str,
)
def test_rows_that_mean_something_else_are_another_component(other: dict[str, object]) -> None:
    changed = PoolRows(**{**{name: getattr(ATTENTION, name) for name in PoolRows.__slots__}, **other})
    parts = [part_of_rows(rows, ParallelRank(0, 1), ModelFacts(), 16) for rows in (ATTENTION, changed)]
    assert parts[0].component != parts[1].component


def test_bytes_that_torch_calls_uint8_are_told_apart_by_what_the_engine_calls_them() -> None:
    rows = PoolRows("kv", 8, 2, 2, 128, "uint8")
    names = {
        part_of_rows(rows, ParallelRank(0, 1), ModelFacts(kv_dtype=dtype), 16).component
        for dtype in ("fp8_e4m3", "fp8_e5m2", "")
    }
    assert len(names) == 3


def test_stages_of_unknown_extent_are_kept_apart() -> None:
    parts = [part_of_rows(ATTENTION, ParallelRank(0, 1, pp, 2), ModelFacts(), 16) for pp in range(2)]
    assert parts[0].component != parts[1].component
    assert [part.box.layers.triple() for part in parts] == [[0, 8, 1]] * 2


def test_heads_that_cannot_be_are_refused_by_number() -> None:
    with pytest.raises(LayoutError, match="1 heads on rank 2 of 4; of 9 heads that is 2"):
        part_of_rows(PoolRows("kv", 8, 2, 1, 128, "bfloat16"), ParallelRank(2, 4), ModelFacts(kv_heads=9), 16)


def test_native_parts_are_equal_for_the_same_rank_alone() -> None:
    places = [
        ParallelRank(0, 1),
        ParallelRank(0, 2),
        ParallelRank(1, 2),
        ParallelRank(0, 1, 0, 2),
        ParallelRank(0, 1, 1, 2),
    ]
    own = {native_part("kv", 64, place, TpPlacement.SHARDED) for place in places}
    shared = {native_part("kv", 64, place, TpPlacement.REPLICATED) for place in places[:3]}
    assert len(own) == len(places)
    assert len(shared) == 1
    assert {part.nbytes for part in own | shared} == {64}


def test_a_prefix_needs_every_page_of_one_pool_and_the_last_ones_of_another() -> None:
    kv, window, state = [True] * 6, [False, True, True, True, True, False], [False, True, False, True, True, True]
    found = {"kv": kv, "swa": window, "mamba": state}
    result = hits(found, {"kv": ALL_PAGES, "swa": 2, "mamba": 1})
    assert result.lengths == (4, 5)
    assert result.reach == {"kv": 6, "swa": 5, "mamba": 6}


def test_a_prefix_shorter_than_a_window_needs_all_of_its_pages() -> None:
    assert hits({"swa": [True, True, False]}, {"swa": 8}).lengths == (1, 2)
    assert hits({"swa": [False, True, True]}, {"swa": 8}).lengths == ()


@pytest.mark.parametrize("found", [{}, {"kv": []}, {"kv": [False, True]}], ids=str)
def test_nothing_is_restorable_where_the_first_page_is_missing(found: dict[str, list[bool]]) -> None:
    assert hits(found, {"kv": ALL_PAGES}).pages == 0


@pytest.mark.parametrize(
    ("write", "tiers"),
    [
        ("write_through", WriteThrough(1)),
        ("write_through_selective", WriteThrough(2)),
        ("write_back", WriteBack()),
    ],
)
def test_sglangs_write_policies_are_the_trees_tiers(write: str, tiers: Tiers) -> None:
    assert TierFlags(2.0, write=write).tiers() == tiers


STORAGE = StorageFlags("dynamic", {"class_name": "KvmoverStore"}, 64, 2.0, 0.5)


@pytest.mark.parametrize(
    ("prefetch", "policy"),
    [("best_effort", BestEffort()), ("wait_complete", Wait()), ("timeout", Timeout(2.0, 0.5))],
)
def test_sglangs_prefetch_policies_and_thresholds_are_the_tiers(prefetch: str, policy: Prefetch) -> None:
    made = TierFlags(2.0, prefetch=prefetch, storage=STORAGE).policy()
    assert (made.prefetch, made.least_tokens, made.store) == (policy, 64, Store.BACKED)


def test_without_a_storage_nothing_is_written_to_one() -> None:
    assert TierFlags(2.0).policy().store is Store.NEVER


def test_flags_that_are_not_understood_are_refused_by_name() -> None:
    with pytest.raises(EngineUnsupported, match="not by write_around"):
        TierFlags(2.0, write="write_around").tiers()
    with pytest.raises(EngineUnsupported, match="not by guess"):
        TierFlags(2.0, prefetch="guess", storage=STORAGE).policy()
    with pytest.raises(EngineUnsupported, match="holds no page of full of 4096 bytes"):
        TierFlags(2.0, host_bytes=4095).host_pages({"full": PoolSize(1000, 4096)})
    for backend, options in (("mooncake", {}), ("dynamic", {"class_name": "Other"})):
        with pytest.raises(EngineUnsupported, match="class_name KvmoverStore, not "):
            StorageFlags(backend, options).check()
    STORAGE.check()
