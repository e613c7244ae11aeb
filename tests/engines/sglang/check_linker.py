"""The direct linker under SGLang's own radix cache: prompts leave device pools for storage, and come back to others."""

from __future__ import annotations

import time
from array import array
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import PAGE, Rank, Shape, pools, ranks, storage

TOKENS = list(range(11, 11 + 6 * PAGE))
POISON = 0x3C

base: Any = import_module("sglang.srt.mem_cache.base_prefix_cache")
unified: Any = import_module("sglang.srt.mem_cache.unified_radix_cache")
radix: Any = import_module("sglang.srt.mem_cache.radix_cache")
inits: Any = import_module("sglang.srt.mem_cache.cache_init_params")
kinds: Any = import_module("sglang.srt.mem_cache.unified_cache.component_type")
factory: Any = import_module("sglang.srt.mem_cache.unified_cache.linker_factory")
paged: Any = import_module("sglang.srt.mem_cache.allocator.paged")

KV, INDEXER = storage.PoolName.KV, storage.PoolName.INDEXER


class Serving:
    """A rank's device pool, allocator and radix cache, with our linker behind it."""

    def __init__(self, rank: Rank, sparse: bool, page: int = PAGE, **options: Any) -> None:
        self.page = page
        self.pool = sparse_pool() if sparse else rank.device_pool()
        allocator = paged.PagedTokenToKVPoolAllocator(self.pool.size, page, self.pool.dtype, "cpu", self.pool, False)
        self.params = inits.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            tp_cache_group=rank.group,
            tree_components=(kinds.ComponentType.FULL,),
        )
        self.cache = unified.UnifiedRadixCache(self.params)
        plug = {"linker": "KvmoverLinker", "linker_module_path": "kvmover.engines.sglang"}
        more = {"linker_extra_config": {"root": str(rank.root), **options}}
        components = {kinds.ComponentType.FULL}
        self.linker = factory.create_unified_cache_linker(
            None, self.params, backend="dynamic", config=plug | more, components=components
        )
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [buffer for pool in self.linker.pools.values() for buffer in pool.kv_buffer]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            raw = buffer.view(-1).view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.view(-1).view(torch.uint8).fill_(POISON)

    def pages(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Every buffer's rows of the pages, [buffer][page, token, rest] as bytes."""
        out = []
        for pool in self.linker.pools.values():
            rows = indices[:: self.page] // self.page if pool._row_span == 1 else indices
            out += [buffer[rows].contiguous().view(torch.uint8).clone() for buffer in pool.kv_buffer]
        return out

    def key(self, tokens: list[int]) -> Any:
        return radix.RadixKey(array("q", tokens))

    def serve(self, tokens: list[int]) -> torch.Tensor:
        """A prompt that was computed: its pages are in the tree, and offloaded."""
        indices = self.params.token_to_kv_pool_allocator.alloc(len(tokens))
        self.cache.insert(base.InsertParams(key=self.key(tokens), value=indices, prev_prefix_len=0))
        deadline = time.monotonic() + 60
        while self.cache.linker.pending_offloads and time.monotonic() < deadline:
            self.cache.check_hicache_events()
        assert not self.cache.linker.pending_offloads
        return indices

    def restore(self, tokens: list[int]) -> tuple[torch.Tensor, list[str]]:
        """As the scheduler does: match, queue, start, forward, finish. Device indices, and requests that failed."""
        request = SimpleNamespace(rid="r", session=None, last_node=None, kv=None, swa_branching_seqlen=None)
        match = self.cache.match_prefix(base.MatchPrefixParams(key=self.key(tokens), req=request))
        request.last_node = match.last_device_node
        if not match.host_hit_length:
            return torch.empty(0, dtype=torch.int64), []
        count, _ = self.cache.linker.load_back(request)
        assert count == match.host_hit_length
        loaded = self.cache.linker.private_load_indices["r"].clone()
        number = self.cache.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(number)
        for layer in range(self.pool.layer_num):
            self.linker.layer_done_counter.wait_until(layer)
        return loaded, self.cache.linker.finish_loads()

    def close(self) -> None:
        self.cache.linker.close()


def sparse_pool() -> Any:
    return pools.DSATokenToKVPool(
        16 * 64, 64, 16, torch.bfloat16, 8, 4, "cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=24
    )


def there_and_back(rank: Rank, sparse: bool) -> None:
    page = 64 if sparse else PAGE
    tokens = list(range(6 * page))
    served = Serving(rank, sparse, page)
    # Ranks with the same heads, and all with the same latent, hold the same bytes.
    served.fill(0 if rank.shape.kind == "mla" else rank.tp * min(4, rank.shape.tp) // rank.shape.tp)
    expected = served.pages(served.serve(tokens))
    served.close()
    torch.distributed.barrier()
    fresh = Serving(rank, sparse, page)
    fresh.poison()
    fresh.params.token_to_kv_pool_allocator.alloc(3 * page)  # other pages than before
    indices, failed = fresh.restore(tokens + [1] * page)
    assert not failed
    assert len(indices) == len(tokens)
    assert all(torch.equal(a, b) for a, b in zip(fresh.pages(indices), expected, strict=True))
    touched = torch.zeros(len(fresh.buffers[0]), dtype=torch.bool)
    touched[indices] = True
    assert (fresh.buffers[0][~touched].contiguous().view(torch.uint8) == POISON).all()
    fresh.close()


@pytest.mark.parametrize("shape", [Shape(kind=kind, tp=tp) for kind in ("mha", "mla") for tp in (1, 2)], ids=str)
def test_a_prompt_leaves_one_radix_cache_and_is_found_by_another(shape: Shape, tmp_path: Path) -> None:
    ranks(shape, tmp_path, there_and_back, False)


@pytest.mark.parametrize("tp", [1, 2])
def test_index_keys_go_with_the_latent(tp: int, tmp_path: Path) -> None:
    ranks(Shape(kind="mla", tp=tp), tmp_path, there_and_back, True)


def test_ranks_that_hold_the_same_latent_write_each_page_once(tmp_path: Path) -> None:
    written = ranks(Shape(kind="mla", tp=4), tmp_path, offloaded)
    assert sum(written) == 12
    assert sum(pages > 0 for pages in written) > 1


def offloaded(rank: Rank) -> int:
    served = Serving(rank, False)
    served.fill(0)
    served.serve(list(range(12 * PAGE)))
    pages = served.linker._adapter.store.counters.puts["written"]
    torch.distributed.barrier()
    assert served.linker._adapter.store.stat().objects == 12
    served.close()
    return pages


def store_heads(rank: Rank) -> torch.Tensor:
    """Offload, and give the pages as [layer, kv, page * token, head, row bytes]."""
    served = Serving(rank, False)
    served.fill(rank.tp)
    held = served.pages(served.serve(TOKENS))
    served.close()
    return torch.stack(held).reshape(2, 4, len(TOKENS), -1, 32).transpose(0, 1)


def fetch_heads(rank: Rank) -> torch.Tensor:
    fresh = Serving(rank, False)
    fresh.poison()
    indices, failed = fresh.restore(TOKENS + [1] * PAGE)
    assert (len(indices), failed) == (len(TOKENS), [])
    held = fresh.pages(indices)
    fresh.close()
    return torch.stack(held).reshape(2, 4, len(TOKENS), -1, 32).transpose(0, 1)


def test_a_fleet_of_another_size_finds_what_two_ranks_offloaded(tmp_path: Path) -> None:
    stored = torch.cat(ranks(Shape(tp=2), tmp_path, store_heads), dim=3)
    for tp in (1, 4):
        assert torch.equal(torch.cat(ranks(Shape(tp=tp), tmp_path, fetch_heads), dim=3), stored)


def test_pages_that_vanish_between_lookup_and_load_fail_their_request_on_every_rank(tmp_path: Path) -> None:
    ranks(Shape(tp=2), tmp_path, vanished)


def vanished(rank: Rank) -> None:
    served = Serving(rank, False)
    served.fill(rank.tp)
    served.serve(TOKENS)
    torch.distributed.barrier()
    fresh = Serving(rank, False)
    match = fresh.cache.linker.match
    store = fresh.linker._adapter.store

    def lost(key: Any, request: Any, result: Any) -> Any:
        found = match(key, request, result)
        torch.distributed.barrier()
        if rank.tp == 0:
            store.evict(1)
        torch.distributed.barrier()
        return found

    fresh.cache.linker.match = lost
    _, failed = fresh.restore(TOKENS + [1] * PAGE)
    assert failed == ["r"]
    assert not fresh.cache.linker.private_load_indices
    for each in (served, fresh):
        each.close()


def test_a_reset_waits_and_leaves_what_is_stored(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, emptied)


def emptied(rank: Rank) -> None:
    served = Serving(rank, False)
    served.fill(1)
    expected = served.pages(served.serve(TOKENS))
    served.cache.reset()
    assert served.linker.num_completed_offloads() == 0
    served.params.token_to_kv_pool_allocator.clear()
    served.poison()
    indices, failed = served.restore(TOKENS + [1] * PAGE)
    assert not failed
    assert all(torch.equal(a, b) for a, b in zip(served.pages(indices), expected, strict=True))
    served.close()


def test_a_queued_load_can_be_cancelled_and_a_second_one_is_refused(tmp_path: Path) -> None:
    ranks(Shape(), tmp_path, cancelled)


def cancelled(rank: Rank) -> None:
    served = Serving(rank, False)
    served.serve(TOKENS)
    transfer = storage.PoolTransfer(name=KV, keys=["0" * 64], device_indices=torch.arange(PAGE))
    assert served.linker.load("a", [transfer])
    with pytest.raises(Exception, match="a load for a is queued already"):
        served.linker.load("a", [transfer])
    assert served.linker.cancel_queued_load("a")
    assert not served.linker.cancel_queued_load("a")
    assert served.linker.start_layer_wise_loading() == -1
    assert not served.linker.load("b", [])
    served.close()


def test_what_the_linker_stored_the_host_tier_reads(tmp_path: Path) -> None:
    """One store for servers with a host tier and without."""
    stored = ranks(Shape("page_first", tp=2), tmp_path, store_heads)
    fetched = ranks(Shape("page_first", tp=2), tmp_path, by_host)
    for tp in range(2):
        assert torch.equal(fetched[tp], stored[tp])


def by_host(rank: Rank) -> torch.Tensor:
    from bench import load, logical

    controller = rank.controller(model=str(rank.root / "model"))
    count, indices = load(controller, TOKENS)
    assert count == len(TOKENS)
    held = [logical(controller.mem_pool_host, page) for page in (indices[::PAGE] // PAGE).tolist()]
    controller.storage_backend.close()
    return torch.stack(held).permute(1, 2, 0, 4, 3, 5).flatten(2, 3)
