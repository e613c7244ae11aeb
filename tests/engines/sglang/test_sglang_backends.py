"""Pages between buffers laid out as SGLang lays them out and a real page store: bytes, neighbours, answers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvmover.config.settings import StoreSettings
from kvmover.engines.common import (
    EmptyBackend,
    EngineUnsupported,
    InPlaceBackend,
    PackedBackend,
    ParallelRank,
    ServedWeights,
    Upkeep,
    page_ids,
)
from kvmover.engines.sglang.page_parts import TpPlacement
from kvmover.engines.sglang.sglang_options import ModelFacts, StoreOptions
from kvmover.engines.sglang.store_adapter import MAIN, Batches, ServedRank, StoreAdapter
from kvmover.errors import StoreError
from kvmover.layout import Component
from kvmover.store import HostBoot, Namespace, PagePart, PageStore, memory_of_buffer

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 7, 3, 2, 8
HASHES = [bytes([number]) * 32 for number in range(16)]
POISON = 0xEE
COMPONENT = Component.attention(2, 2, 8, "bfloat16")


def _undescribed(_: torch.Tensor) -> Any:
    raise NotImplementedError


def host_pool(kind: str, layout: str, **more: Any) -> Any:
    """What is read of a host pool of that class, with random bytes in it."""
    tokens = PAGE * PAGES
    dims = {
        ("MHATokenToKVPoolHost", "layer_first"): (2, LAYERS, tokens, HEADS, DIM),
        ("MHATokenToKVPoolHost", "page_first"): (2, tokens, LAYERS, HEADS, DIM),
        ("MHATokenToKVPoolHost", "page_first_direct"): (2, PAGES, LAYERS, PAGE, HEADS, DIM),
        ("MHATokenToKVPoolHost", "page_head"): (2, PAGES, HEADS, PAGE, LAYERS, DIM),
        ("MLATokenToKVPoolHost", "page_first"): (tokens, LAYERS, 1, DIM),
        ("MLATokenToKVPoolHost", "page_first_direct"): (PAGES, LAYERS, PAGE, 1, DIM),
    }[kind, layout]
    buffer = torch.randint(-1000, 1000, dims).to(torch.bfloat16)
    facts = {"layout": layout, "page_size": PAGE, "kv_buffer": buffer, "size_per_token": 1, "layer_num": LAYERS}
    more = {"get_page_buffer_meta": _undescribed, **more}
    pool: Any = type(kind, (SimpleNamespace,), {})(**facts, start_layer=0, end_layer=LAYERS, **more)
    if kind.startswith("MHA"):
        pool.head_dim = pool.v_head_dim = DIM
    return pool


def adapter(root: Path, place: ParallelRank | None = None, **more: Any) -> StoreAdapter:
    rank = ServedRank(ServedWeights("m", "1"), ModelFacts(**more), place or ParallelRank(0, 1), TpPlacement.SHARDED)
    return StoreAdapter(StoreOptions(), StoreSettings(root=root), rank, PAGE)


def tokens_of(pages: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def raw(pool: Any) -> torch.Tensor:
    return pool.kv_buffer.view(-1).view(torch.uint8)


KINDS = [
    *(("MHATokenToKVPoolHost", layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *(("MLATokenToKVPoolHost", layout) for layout in ("page_first", "page_first_direct")),
]


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_pages_come_back_into_other_places_and_touch_no_neighbour(kind: str, layout: str, tmp_path: Path) -> None:
    pool, opened = host_pool(kind, layout), adapter(tmp_path)
    with opened.store:
        backend = opened.backend(pool, MAIN)
        before = raw(pool).clone()
        assert backend.put(HASHES[:3], tokens_of([5, 0, 2])) == [True] * 3
        assert backend.exists(HASHES[:5]) == [True] * 3 + [False] * 2
        assert torch.equal(raw(pool), before)
        raw(pool).fill_(POISON)
        assert backend.get([*HASHES[:3], HASHES[9]], tokens_of([1, 6, 3, 4])) == [True, True, True, False]
        wanted = torch.full_like(before, POISON)
        axes = "slot" if layout in ("layer_first", "page_first") else "page"
        at = {"layer_first": 2, "page_first": 1, "page_first_direct": 1, "page_head": 1}[layout] - (kind[1] == "L")
        old, new = (flat.view(torch.bfloat16).view(pool.kv_buffer.shape) for flat in (before, wanted))
        for source, target in ((5, 1), (0, 6), (2, 3)):
            width = PAGE if axes == "slot" else 1
            new.narrow(at, target * width, width).copy_(old.narrow(at, source * width, width))
        assert torch.equal(raw(pool), wanted)


def test_only_a_latent_page_first_direct_is_stored_from_where_it_lies(tmp_path: Path) -> None:
    opened = adapter(tmp_path)
    with opened.store:
        pools = {key: host_pool(*key) for key in KINDS}
        made = {key: type(opened.backend(pool, MAIN)) for key, pool in pools.items()}
    assert [key for key, kind in made.items() if kind is InPlaceBackend] == [
        ("MLATokenToKVPoolHost", "page_first_direct")
    ]
    assert set(made.values()) == {InPlaceBackend, PackedBackend}


def test_more_pages_than_the_bounce_holds_go_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmover.engines.common.pages.GROUP_BYTES", 1)
    pool, opened = host_pool(*KINDS[0]), adapter(tmp_path)
    with opened.store:
        backend = opened.backend(pool, MAIN)
        assert backend.put(HASHES[:PAGES], tokens_of(list(range(PAGES)))) == [True] * PAGES
        before = raw(pool).clone()
        raw(pool).fill_(POISON)
        assert backend.get(HASHES[:PAGES], tokens_of(list(range(PAGES)))) == [True] * PAGES
        assert torch.equal(raw(pool), before)


def test_pages_that_are_stored_already_are_neither_packed_nor_written(tmp_path: Path) -> None:
    pool, opened = host_pool(*KINDS[0]), adapter(tmp_path)
    with opened.store as store:
        backend = opened.backend(pool, MAIN)
        backend.put(HASHES[:2], tokens_of([0, 1]))
        raw(pool).fill_(POISON)
        assert backend.put(HASHES[:2], tokens_of([0, 1])) == [True] * 2
        assert store.counters.written_bytes == 2 * backend.page_bytes
        raw(pool).zero_()
        backend.get(HASHES[:1], tokens_of([0]))
        assert POISON not in raw(pool)[:4]


def test_ranks_that_repeat_a_head_share_the_pages_out(tmp_path: Path) -> None:
    """Two heads on four ranks: each page of each head is written by one of two."""
    written = 0
    for tp in range(4):
        opened = adapter(tmp_path, ParallelRank(tp, 4), kv_heads=2)
        with opened.store as store:
            pool = host_pool("MHATokenToKVPoolHost", "page_first")
            pool.kv_buffer = pool.kv_buffer[:, :, :, :1].contiguous()
            assert all(opened.backend(pool, MAIN).put(HASHES[:PAGES], tokens_of(list(range(PAGES)))))
            written += store.counters.written_bytes
    assert written == 2 * PAGES * PAGE * LAYERS * 2 * DIM * 2


def test_stages_that_keep_one_layer_each_write_all_of_it(tmp_path: Path) -> None:
    """Of a model nobody knows the layers of: one of two would be elected to write the only layer, which is two."""
    for pp in range(2):
        opened = adapter(tmp_path, ParallelRank(0, 1, pp, 2))
        with opened.store:
            pool = host_pool("MHATokenToKVPoolHost", "page_first")
            pool.kv_buffer = pool.kv_buffer[:, :, :1].contiguous()
            pool.layer_num = pool.end_layer = 1
            backend = opened.backend(pool, MAIN)
            assert all(backend.put(HASHES[:PAGES], tokens_of(list(range(PAGES)))))
            assert backend.exists(HASHES[:PAGES]) == [True] * PAGES


@pytest.mark.parametrize(
    "tokens", [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 4, 8, 12], [4, 5, 6, 7, 8, 9, 10, 11]], ids=str
)
def test_indices_that_are_not_whole_pages_are_refused_before_anything_is_moved(tokens: list[int]) -> None:
    with pytest.raises(StoreError, match=f"{len(tokens)} indices for 1 pages of 4 tokens"):
        page_ids(np.array(tokens), 1, PAGE)


def test_a_pool_that_only_numbers_pages_has_nothing_to_store(tmp_path: Path) -> None:
    opened = adapter(tmp_path)
    logical = SimpleNamespace(size_per_token=0, layout="layer_first")
    with opened.store as store:
        backend = opened.backend(logical, MAIN)
        assert isinstance(backend, EmptyBackend)
        assert backend.put(HASHES[:2], tokens_of([0, 1])) == backend.exists(HASHES[:2]) == [True] * 2
        assert not store.stat().objects


@pytest.mark.parametrize("cut", [{"_layer_shard_enabled": True}, {"_is_dummy": True}], ids=str)
def test_a_pool_that_holds_no_whole_pages_is_refused(cut: dict[str, bool], tmp_path: Path) -> None:
    opened = adapter(tmp_path)
    with opened.store, pytest.raises(EngineUnsupported, match="kvmover stores w"):
        opened.backend(host_pool(*KINDS[4], **cut), MAIN)


def test_an_unknown_pool_without_pages_to_point_at_is_refused(tmp_path: Path) -> None:
    opened = adapter(tmp_path)
    pool = SimpleNamespace(size_per_token=1, layout="layer_first", page_size=PAGE)
    with opened.store, pytest.raises(EngineUnsupported, match="host pool odd of SimpleNamespace cannot be stored"):
        opened.backend(pool, "odd")


def test_an_idle_rank_flushes_what_it_put_and_collects(tmp_path: Path) -> None:
    """Nobody moves a page after the put: another machine sees it all the same."""
    settings = StoreSettings(root=tmp_path, upkeep_s=0.01, flush_s=0.01)
    space, part = Namespace("llama", "1", PAGE), PagePart.whole(COMPONENT, PAGE)
    page = bytearray(part.nbytes)
    memory = memory_of_buffer(page)
    with (
        PageStore.open(tmp_path, space) as store,
        PageStore.open(tmp_path, space, machine=HostBoot(bytes(16))) as other,
    ):
        store.register(memory)
        assert store.view(space, part).put([bytes(32)], [memory.address])[0].ok
        seen = other.view(space, part)
        assert seen.exists([bytes(32)]) == [False]
        upkeep = Upkeep(store, settings)
        while not seen.exists([bytes(32)])[0]:
            time.sleep(0.01)
        upkeep.close()
        upkeep.close()


def test_a_flush_that_fails_is_logged_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tried = threading.Semaphore(0)

    def full() -> None:
        tried.release()
        raise StoreError("cannot flush: No space left on device")

    store: Any = SimpleNamespace(collect=lambda: None, flush=full)
    upkeep = Upkeep(store, StoreSettings(root=tmp_path, flush_s=0.01))
    for _ in range(2):
        tried.acquire()
    upkeep.close()
    assert set(caplog.messages) == {"upkeep of the page store: cannot flush: No space left on device"}


def test_figures_of_batches_are_taken_once() -> None:
    batches = Batches()
    batches.add(128, 1 << 30, 0.5)
    batches.add(0, 0, 0.1)
    pages, gb_s = batches.take()
    assert pages == [128]
    assert gb_s == [pytest.approx(2.147483648)]
    assert batches.take() == ([], [])


def test_a_page_that_sglang_finds_elsewhere_in_its_own_pool_is_refused_with_both_places(tmp_path: Path) -> None:
    pool, opened = host_pool("MLATokenToKVPoolHost", "page_first"), adapter(tmp_path)
    first, nbytes = pool.kv_buffer.data_ptr(), LAYERS * DIM * 2 * PAGE
    with opened.store:
        for found, wrong in (([nbytes], False), ([0], True), ([nbytes + 2], True)):
            pool.get_page_buffer_meta = lambda _, found=found: ([first + at for at in found], [nbytes] * len(found))
            if wrong:
                expected = (
                    rf"the cache of kv as \[\({first + nbytes}, {nbytes}\)\].* describes it as \[\({first + found[0]},"
                )
                with pytest.raises(EngineUnsupported, match=expected):
                    opened.backend(pool, MAIN)
            else:
                opened.backend(pool, MAIN)
