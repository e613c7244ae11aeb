"""The page store behind SGLang's own cache controller: its factory, its host pools, its threads, its collectives."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import PAGE, Rank, Shape, content, keys_of, load, logical, ranks, save, storage

from kvmover.engines.common import is_of
from kvmover.engines.sglang.sglang_contract import SGLANG
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.store.deletion import DeletionOrder
from tests.safetensors_files import tiny, write_checkpoint
from tests.store.segments import segments_of

hicache: Any = import_module("sglang.srt.mem_cache.hicache_storage")
TOKENS = list(range(100, 100 + 5 * PAGE))
POISON = 0xA5

LAYOUTS = [
    *(Shape(layout, "mha") for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *(Shape(layout, "mla") for layout in ("layer_first", "page_first", "page_first_direct")),
]


def named(shape: Shape) -> str:
    return f"{shape.kind}-{shape.layout}"


def same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether the pages are the same, byte by byte, and as many."""
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def filled(controller: Any, seed: int) -> torch.Tensor:
    """Fill the host pool, and take the pages of TOKENS in it, out of order."""
    host = controller.mem_pool_host
    host.kv_buffer.view(-1).view(torch.uint8).copy_(content(host, seed))
    pages = host.alloc(len(TOKENS)).reshape(-1, PAGE)
    return pages[torch.tensor([3, 0, 4, 1, 2])].reshape(-1)


def pages_at(controller: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    return [logical(controller.mem_pool_host, page).clone() for page in (indices[::PAGE] // PAGE).tolist()]


def poison(controller: Any) -> None:
    controller.mem_pool_host.kv_buffer.view(-1).view(torch.uint8).fill_(POISON)


def wrote(rank: Rank, seed: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Store TOKENS from a pool of random bytes; the pages."""
    controller = rank.controller(**options)
    indices = filled(controller, seed)
    assert save(controller, indices, TOKENS, keys_of(TOKENS)) == (0 if controller.backup_skip else len(TOKENS))
    written = pages_at(controller, indices)
    controller.storage_backend.close()
    return written


def read(rank: Rank, options: dict[str, Any]) -> list[torch.Tensor]:
    """Fetch what is stored of TOKENS into a poisoned pool; the pages. No other page may change."""
    controller = rank.controller(**options)
    poison(controller)
    count, indices = load(controller, TOKENS)
    assert count == len(indices)
    fetched = pages_at(controller, indices)
    touched = set((indices[::PAGE] // PAGE).tolist())
    for page in set(range(controller.mem_pool_host.page_num)) - touched:
        assert (logical(controller.mem_pool_host, page) == POISON).all(), page
    controller.storage_backend.close()
    return fetched


def round_trip(rank: Rank, options: dict[str, Any]) -> None:
    written = wrote(rank, 1, options)
    assert same(read(rank, options), written)


@pytest.mark.parametrize("shape", LAYOUTS, ids=named)
def test_pages_go_through_the_engines_threads_and_come_back(shape: Shape, tmp_path: Path) -> None:
    ranks(shape, tmp_path, round_trip, {})


@pytest.mark.parametrize("shape", [shape for shape in LAYOUTS if shape.layout != "layer_first"], ids=named)
def test_native_pages_come_back_from_where_they_lie(shape: Shape, tmp_path: Path) -> None:
    ranks(shape, tmp_path, round_trip, {"objects": "native"})


@pytest.mark.parametrize("shape", [LAYOUTS[1], LAYOUTS[6]], ids=named)
def test_the_older_interface_moves_the_same_pages(shape: Shape, tmp_path: Path) -> None:
    ranks(shape, tmp_path, round_trip, {"interface_v1": 0})
    ranks(shape, tmp_path, same_through_both, {})


def same_through_both(rank: Rank, options: dict[str, Any]) -> None:
    old, new = (read(rank, {**options, "interface_v1": version}) for version in (0, 1))
    assert len(new) == 5
    assert same(old, new)


def test_pages_of_the_weights_before_an_update_are_not_found_and_those_of_one_version_are(tmp_path: Path) -> None:
    ranks(LAYOUTS[1], tmp_path, updated)


def updated(rank: Rank) -> None:
    controller, updates = rank.controller(), UPDATES
    indices, keys = filled(controller, 1), keys_of(TOKENS)
    found = [controller.storage_backend.batch_exists(keys)]
    for version in (None, "2", "3", None, "2"):
        with updates.step():
            if version is not None or len(found) > 1:
                updates.loaded(version)
                updates.flushed()
        found.append(controller.storage_backend.batch_exists(keys))
        assert save(controller, indices, TOKENS, keys) == (0 if updates.is_changed and version is None else len(TOKENS))
        found.append(controller.storage_backend.batch_exists(keys))
    assert found == [0, 0, 5, 0, 5, 0, 5, 0, 0, 5, 5]
    controller.storage_backend.close()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_what_one_host_layout_wrote_every_other_reads(kind: str, tmp_path: Path) -> None:
    written = ranks(Shape("page_first", kind), tmp_path, wrote, 2, {})[0]
    for shape in LAYOUTS:
        if shape.kind == kind:
            fetched = ranks(shape, tmp_path, read, {})[0]
            assert same(fetched, written)


def joined(parts: list[list[torch.Tensor]], shape: Shape) -> list[torch.Tensor]:
    """Pages of a whole model from those of its ranks. Ranks beyond the heads repeat them."""
    held = [torch.stack(pages) for pages in parts]
    alone = [held[pp * shape.tp : (pp + 1) * shape.tp : max(1, shape.tp // 4)] for pp in range(shape.pp)]
    return list(torch.cat([torch.cat(stage, dim=3) for stage in alone], dim=1))


@pytest.mark.parametrize("reader", [Shape(tp=1), Shape(tp=4), Shape(tp=2, pp=2), Shape("page_head", pp=4), Shape(tp=8)])
def test_pages_of_two_ranks_are_read_by_fleets_of_another_shape(reader: Shape, tmp_path: Path) -> None:
    """tp=8 repeats each of 4 heads on two ranks."""
    writer = Shape("page_first_direct", tp=2)
    written = joined(ranks(writer, tmp_path, wrote_own, 0, {}), writer)
    fetched = joined(ranks(reader, tmp_path, read, {}), reader)
    assert same(fetched, written)


def wrote_own(rank: Rank, seed: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Every rank has bytes of its own, but ranks with the same heads the same."""
    return wrote(rank, seed + rank.pp * 100 + rank.tp * min(4, rank.shape.tp) // rank.shape.tp, options)


def test_ranks_that_repeat_heads_write_each_page_once(tmp_path: Path) -> None:
    shape = Shape(tp=8)
    written = joined(ranks(shape, tmp_path, wrote_own, 0, {}), shape)
    assert ranks(Shape(), tmp_path, objects)[0] == 4 * 5
    fetched = ranks(Shape(), tmp_path, read, {})[0]
    assert same(fetched, written)


def objects(rank: Rank) -> int:
    controller = rank.controller()
    stat = controller.storage_backend._adapter.store.stat()
    controller.storage_backend.close()
    return stat.objects


def test_of_ranks_that_hold_the_same_latent_the_engine_lets_one_write(tmp_path: Path) -> None:
    written = ranks(Shape("page_first_direct", "mla", tp=2), tmp_path, wrote, 7, {})
    assert ranks(Shape("page_first", "mla"), tmp_path, objects)[0] == 5
    for shape in (Shape("page_first", "mla", tp=2), Shape("layer_first", "mla")):
        for fetched in ranks(shape, tmp_path, read, {}):
            assert same(fetched, written[0])


@pytest.mark.parametrize("options", [{}, {"objects": "native"}], ids=str)
def test_a_copy_of_the_latent_is_not_written_again_by_a_rank_that_is_asked_all_the_same(
    options: dict[str, Any], tmp_path: Path
) -> None:
    ranks(Shape("page_first_direct", "mla", tp=2), tmp_path, asked, options)


def asked(rank: Rank, options: dict[str, Any]) -> None:
    """By every call that there is; each says that the pages need not be stored again."""
    controller = rank.controller(**options)
    backend, indices = controller.storage_backend, filled(controller, 1)
    keys = keys_of(TOKENS)
    name = hicache.PoolName.KV
    backend.register_mem_host_pool_v2(controller.mem_pool_host, name)
    if rank.tp == 1:
        assert backend.batch_set_v1(keys, indices) == [True] * 5
        assert backend.batch_set_v2([hicache.PoolTransfer(name, indices, keys=keys)]) == {name: [True] * 5}
        flat = controller.mem_pool_host.get_data_page(0, flat=True)
        assert backend.set(keys[0], flat)
        assert backend.batch_set(keys, [flat] * 5)
        assert backend.batch_exists(keys) == 0
        assert not backend._adapter.store.counters.written_bytes
    torch.distributed.barrier()
    if rank.tp == 0:
        assert backend.batch_set_v1(keys, indices) == [True] * 5
    torch.distributed.barrier()
    assert backend.batch_exists(keys) == 5
    assert backend.batch_get_v1(keys, indices) == [True] * 5
    backend.close()


def test_pipeline_stages_do_not_mistake_each_others_layers(tmp_path: Path) -> None:
    """SGLang's NIXL backend gives both stages one name."""
    for options in ({}, {"objects": "native"}):
        shape = Shape(pp=2)
        written = ranks(shape, tmp_path, wrote_own, 0, options)
        fetched = ranks(shape, tmp_path, read, options)
        assert not torch.equal(written[0][0], written[1][0])
        for stage in range(2):
            assert same(fetched[stage], written[stage])


def test_native_pages_of_another_shape_are_a_miss_and_never_wrong_bytes(tmp_path: Path) -> None:
    options = {"objects": "native"}
    ranks(Shape("page_first", tp=2), tmp_path, wrote_own, 0, options)
    for reader in (Shape("page_first"), Shape("page_first_direct", tp=2), Shape("page_first", pp=2)):
        assert all(not fetched for fetched in ranks(reader, tmp_path, read, options))


def test_one_lost_page_costs_the_pages_behind_it_and_no_others(tmp_path: Path) -> None:
    """The ranks agree: the object that rank 1 lacks cuts the prefix of both."""
    written = ranks(Shape(tp=2), tmp_path, wrote_own, 0, {})
    fetched = ranks(Shape(tp=2), tmp_path, read_without_third, {})
    for rank in range(2):
        assert same(fetched[rank], written[rank][:2])


def read_without_third(rank: Rank, options: dict[str, Any]) -> list[torch.Tensor]:
    """Rank 1's own part of the third page is damaged after the lookup has found it."""
    controller = rank.controller(**options)
    poison(controller)
    backend = controller.storage_backend
    get = backend.batch_get_v1

    def damaged(keys: list[str], indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        if rank.tp == 1:
            store = backend._adapter.store
            page = segments_of(store).catalog.index.get(bytes.fromhex(keys[2]))
            assert page is not None
            segments_of(store).catalog.delete(
                [each for each in page.objects if each.part.box.heads.start == 2], DeletionOrder.CLEARED
            )
        answers = get(keys, indices, extra_info)
        assert answers == [True, True, rank.tp == 0, True, True]
        return answers

    backend.batch_get_v1 = damaged
    count, indices = load(controller, TOKENS)
    fetched = pages_at(controller, indices[: 2 * PAGE])
    assert count == 2 * PAGE
    controller.storage_backend.close()
    return fetched


def test_what_sglang_asks_of_every_backend_is_answered_as_its_own_do(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, answered)


def answered(rank: Rank) -> None:
    """Indices for another number of pages move nothing, and a miss names no pool."""
    backend = rank.controller().storage_backend
    keys, short = keys_of(TOKENS)[:2], torch.arange(1)
    assert backend.batch_exists_v2(keys).extra_pool_hit_pages == {}
    assert backend.batch_set_v1(keys, short) == backend.batch_get_v1(keys, short) == [False, False]
    whole = hicache.PoolTransfer(name=hicache.PoolName.KV, keys=keys, host_indices=short)
    assert backend.batch_set_v2([whole]) == backend.batch_get_v2([whole]) == {hicache.PoolName.KV: [False, False]}
    assert backend.batch_exists(keys) == 0
    backend.close()


def test_hits_of_several_pools_are_those_of_sglangs_file_backend(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, compared)


#: Releases whose file backend answers otherwise than later ones.
BEFORE_23 = ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22")


def compared(rank: Rank) -> None:
    """Over what is there of four pages in three pools, of which one needs all and two their last ones."""
    backend, config = rank.controller().storage_backend, storage.HiCacheStorageConfig
    theirs = storage.HiCacheFile(config(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config={}), str(rank.root))
    own, there = backend._backends, set[str]()
    theirs._collect_existing_component_keys = lambda *_: there
    keys, draw, lengths = keys_of(TOKENS)[:4], random.Random(7), set[tuple[int, ...]]()
    try:
        for _ in range(400):
            asked = [("dsa", hicache.PoolHitPolicy.ALL_PAGES, 4)]
            asked += [(name, hicache.PoolHitPolicy.TRAILING_PAGES, draw.randint(1, 4)) for name in ("swa", "mamba")]
            draw.shuffle(asked)
            found = {name: [draw.random() < 0.7 for _ in keys] for name in ("kv", "dsa", "swa", "mamba")}
            backend._backends = {
                name: SimpleNamespace(exists=lambda asked, some=some: some[: len(asked)])
                for name, some in found.items()
            }
            there.clear()
            for name, some in found.items():
                there |= {f"{theirs._get_component_key(k, name)}.bin" for k, had in zip(keys, some, strict=True) if had}
            transfers = [
                hicache.PoolTransfer(name=name, keys=keys[-count:], hit_policy=policy) for name, policy, count in asked
            ]
            ours, expected = (each.batch_exists_v2(keys, transfers) for each in (backend, theirs))
            if is_of(SGLANG.installed(), BEFORE_23):  # their own backend asks less of states
                assert ours.kv_hit_pages <= expected.kv_hit_pages
            else:
                assert ours.kv_hit_pages == expected.kv_hit_pages
                assert ours.restorable_prefix_pages == expected.restorable_prefix_pages
            assert expected.extra_pool_hit_pages.items() <= ours.extra_pool_hit_pages.items()
            lengths.add(tuple(getattr(ours, "restorable_prefix_pages", ())))
    finally:
        backend._backends = own
    no_lengths = is_of(SGLANG.installed(), ("0.5.18",))
    assert lengths == {()} if no_lengths else {(), (1,), (4,), (1, 4), (1, 2, 3, 4)} <= lengths
    backend.close()


@pytest.mark.parametrize("shape", [LAYOUTS[1], LAYOUTS[6]], ids=named)
def test_pages_one_by_one_and_by_any_name_keep_to_sglangs_contract(shape: Shape, tmp_path: Path) -> None:
    ranks(shape, tmp_path, one_by_one)


def one_by_one(rank: Rank) -> None:
    """What was stored first stays, a miss is None and moves nothing, and what was cleared can be stored again."""
    controller = rank.controller()
    backend, host = controller.storage_backend, controller.mem_pool_host
    filled(controller, 1)
    first, second = (host.get_data_page(page * PAGE, flat=True).clone().view(torch.uint8) for page in (0, 1))
    name, missing, into = "request 7, page 1", "cafebabe", torch.zeros_like(first)
    assert backend.get(name, into) is None
    assert backend.set(name, first)
    assert backend.set(name, second)
    assert backend.exists(name)
    assert not backend.exists(missing)
    assert same([backend.get(name, into)], [first])
    found = backend.batch_get([missing, name], [torch.zeros_like(first) for _ in range(2)])
    assert found[0] is None
    assert same(found[1:], [first])
    assert (backend.batch_exists([name, missing, name]), backend.batch_exists([])) == (1, 0)
    backend.clear()
    assert not backend.exists(name)
    assert backend.set(name, second)
    assert same([backend.get(name, into)], [second])
    backend.close()


def test_a_page_that_is_missing_costs_no_other_and_batches_leave_no_file_open(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, with_a_gap)


def with_a_gap(rank: Rank) -> None:
    controller = rank.controller()
    backend, indices, keys = controller.storage_backend, filled(controller, 1), keys_of(TOKENS)
    written = pages_at(controller, indices)
    some = [0, 1, 3, 4]
    at = torch.cat([indices[number * PAGE : (number + 1) * PAGE] for number in some])
    assert backend.batch_set_v1([keys[number] for number in some], at) == [True] * 4
    backend.batch_get_v1(keys[:1], indices[:PAGE])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        poison(controller)
        assert backend.batch_get_v1(keys, indices) == [True, True, False, True, True]
    after = pages_at(controller, indices)
    assert (after[2] == POISON).all()
    assert same([after[number] for number in some], [written[number] for number in some])
    assert len(os.listdir("/proc/self/fd")) <= before
    backend.close()


def test_clear_forgets_this_model_and_no_other(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, cleared)


def cleared(rank: Rank) -> None:
    for weights in ("one", "two"):
        wrote(rank, 1, {"weights": weights})
    controller = rank.controller(weights="one")
    controller.storage_backend.clear()
    controller.storage_backend.close()
    assert not read(rank, {"weights": "one"})
    assert len(read(rank, {"weights": "two"})) == 5


@pytest.mark.parametrize("other", [{"weights": "2"}, {"tenant": "b"}])
def test_pages_under_other_premises_are_not_found(other: dict[str, Any], tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, wrote, 0, {})
    assert ranks(Shape(), tmp_path, read, other) == [[]]


def test_pages_of_other_weights_at_the_same_path_are_not_found_and_of_the_same_they_are(tmp_path: Path) -> None:
    """Whatever people call the model, and however its checkpoint is split into files."""
    ranks(Shape(tp=2), tmp_path, wrote, 0, {})
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    write_checkpoint(tmp_path / "model", tiny(seed=2))
    assert ranks(Shape(tp=2), tmp_path, read, {}) == [[], []]
    (tmp_path / "model" / "model.safetensors").unlink()
    write_checkpoint(tmp_path / "model", tiny(), files=3)
    assert [len(found) for found in ranks(Shape(tp=2), tmp_path, read, {"model": "another name"})] == [5, 5]


def test_weights_that_nobody_can_tell_from_others_need_a_word_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.gguf").write_bytes(b"x")
    ranks(Shape(tp=2), tmp_path, refused, {}, r"has weights in \.gguf and no safetensors\. Name them")
    ranks(Shape(), tmp_path, wrote, 0, {"weights": "mine"})


def test_metrics_tell_pages_and_bandwidth_of_both_directions(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, measured)


def measured(rank: Rank) -> None:
    controller = rank.controller()
    save(controller, filled(controller, 1), TOKENS, keys_of(TOKENS))
    load(controller, TOKENS)
    stats = controller.storage_backend.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([5], [5])
    assert min(stats.prefetch_bandwidth + stats.backup_bandwidth) > 0
    assert controller.storage_backend.get_stats().prefetch_pgs == []
    controller.storage_backend.close()


def test_a_backend_can_be_detached_and_attached_again(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, reattached)


def reattached(rank: Rank) -> None:
    controller = rank.controller()
    save(controller, filled(controller, 1), TOKENS, keys_of(TOKENS))
    controller.detach_storage_backend()
    controller.attach_storage_backend("dynamic", PAGE, "the model", rank.options())
    assert load(controller, TOKENS)[0] == len(TOKENS)
    controller.detach_storage_backend()


REFUSED = [
    ({"root": "/nowhere/at/all"}, "is not a directory"),
    ({"quota": 3}, "there is no 'quota'; did you mean quota_bytes?"),
    ({"objects": "mine"}, "Invalid enum value 'mine'"),
    ({"kv_heads": 9}, "heads"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=str)
def test_what_makes_no_sense_fails_the_attach_with_a_sentence(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    ranks(Shape(tp=4), tmp_path, refused, options, reason)


def refused(rank: Rank, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        rank.controller(**options)


def test_pools_cut_over_context_parallel_ranks_are_refused(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, cut_pool)


def cut_pool(rank: Rank) -> None:
    host = rank.host_pool(rank.device_pool())
    stand_in = type("PageInterleaveHostPool", (), {"page_size": PAGE, "layout": host.layout})()
    config = storage.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=rank.options())
    from kvmover.engines.sglang import KvmoverStore

    store = KvmoverStore(config, {})
    with pytest.raises(Exception, match="cut over context-parallel ranks"):
        store.register_mem_pool_host(stand_in)
