"""SGLang's requests of models with windows and states over kvmover's tiers: each component comes back, byte by byte.

A window comes back beside other pages of attention KV than it left, and a state to another slot, from which the request
takes its copy.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from check_tiers import (
    ALONE,
    POISON,
    PoolContent,
    TieredServer,
    context_of,
    flags_of,
    history,
    run,
    served,
    with_accounts,
)
from scheduling import NOTHING, Server, base, context, kinds, parameters, pools, publish, swa, swa_pools, tokens_of
from scheduling import paged as paged_of
from states import CHUNK, SNAPSHOTS, StateServer, number, state_rows

from kvmover.cache.prefix import Tier
from kvmover.cache.tiers import TierCount
from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang import engine_radix, sglang_plugin
from kvmover.engines.sglang.radix_tiers import TieredRadixCache
from kvmover.engines.sglang.tier_pools import open_tiers

#: Layers with states, then with attention, every other one of which sees a window: two groups of layers each.
RECURRENT, LAST = (0, 1), 22
PAGES = [1, 4]
KINDS = ["windows", "states", "both"]
WINDOW_TOKENS = 6
#: SGLang's names of what the kinds keep beside attention KV.
HELD = {"windows": ("swa",), "states": ("mamba",), "both": ("swa", "mamba")}
SWA, MAMBA = kinds.ComponentType.SWA, kinds.ComponentType.MAMBA


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish(tmp_path_factory.mktemp("serving"), **SNAPSHOTS)
    context.get_server_args()._mamba_cache_chunk_size = CHUNK


class HybridServer(TieredServer, StateServer):
    """As TieredServer, with what further layers keep. Of states all layers, and both parts, are looked at."""

    def __post_init__(self) -> None:
        Server.__post_init__(self)
        self.tiers = {"device": 0, "host": 0}
        kvcache = self.allocator.get_kvcache()
        attention = [layer for layer in range(len(RECURRENT), LAST) if self.window is None or layer % 2]
        self.content: Any = PoolContent(kvcache, attention)
        if self.window is not None:
            self.window_content: Any = PoolContent(kvcache, range(len(RECURRENT), LAST, 2))
        self.stateful = self.cache.supports_mamba()
        if self.stateful:
            cache = self.rows.mamba_pool.mamba_cache
            self.parts = [cache.temporal, *cache.conv]
            self.snapshots, self.branched = self.rows.enable_mamba_extra_buffer, 0

    def room(self) -> int:
        return StateServer.room(self) if self.stateful else Server.room(self)

    def extend(self, req: Any) -> None:
        (StateServer if self.stateful else Server).extend(self, req)

    def prefill(self, req: Any, chunk: int = 1 << 20) -> bool:
        return (StateServer if self.stateful else Server).prefill(self, req, chunk)

    def decode(self, req: Any) -> bool:
        return (StateServer if self.stateful else Server).decode(self, req)

    def check(self) -> None:
        (StateServer if self.stateful else Server).check(self)

    def poison(self) -> None:
        page, allocator = self.cache.page_size, self.allocator
        pairs = [(allocator if self.window is None else allocator.full_attn_allocator, self.content)]
        if self.window is not None:
            pairs.append((allocator.swa_attn_allocator, self.window_content))
        for of, content in pairs:
            first = of.get_all_free_pages().long()
            rows = first if page == 1 else (first[:, None] * page + torch.arange(page)).flatten()
            for layer in content.layers:
                for plane in content.planes(layer):
                    plane[rows] = POISON
        if self.stateful:
            for part in self.parts:
                part[:, self.rows.mamba_allocator.free_slots] = POISON

    def evict_all(self) -> None:
        self.settle()
        self.cache.evict(base.EvictParams(num_tokens=self.size, swa_num_tokens=self.size, mamba_num=self.size))
        assert self.cache.total_size() == 0
        self.check()
        self.poison()

    def _state(self, req: Any) -> int:
        """Equal in all layers but for the sign, or it is another's somewhere."""
        slot, signs = int(req.kv.mamba_pool_idx), torch.tensor([1.0, -1.0])
        values = torch.cat([part[:, slot].flatten(1) * signs[:, None] for part in self.parts], 1)
        return int(values[0, 0]) if bool((values == values[0, 0]).all()) else NOTHING

    def _write(self, slot: torch.Tensor, req: Any, tokens: int) -> None:
        for part in self.parts:
            for layer, sign in zip(RECURRENT, (1, -1), strict=True):
                part[layer, int(slot)] = sign * number(req, tokens)


def serving(
    kind: str, page: int, size: int = 256, root: Path | None = None, accounts: Any = None, **more: Any
) -> HybridServer:
    rows: Any = None if kind == "windows" else state_rows(24, "none" if page == 1 else "kept")
    attention = range(len(RECURRENT), LAST)
    if kind == "states":
        pool = pools.HybridLinearKVPool(size, torch.float32, page, 1, 4, list(attention), "cpu", rows.mamba_pool)
        one = [torch.float32, "cpu", pool, False]
        allocator = (
            tokens_of.TokenToKVPoolAllocator(size, *one)
            if page == 1
            else paged_of.PagedTokenToKVPoolAllocator(size, page, *one)
        )
    else:
        windows, full = ([layer for layer in attention if layer % 2 == odd] for odd in (0, 1))
        pool = swa_pools.SWAKVPool(
            size, size, page, torch.float32, 1, 4, windows, full, "cpu", enable_memory_saver=False
        )
        allocator = swa.SWATokenToKVPoolAllocator(size, size, page, torch.float32, "cpu", pool, False)
    params = parameters(
        page,
        size,
        window=None if kind == "states" else WINDOW_TOKENS,
        rows=rows,
        enable_mamba_extra_buffer=rows is not None and page > 1,
    )
    params.token_to_kv_pool_allocator = allocator
    flags = flags_of(root, **more)
    tiers = open_tiers(params, flags, ALONE)
    cache = TieredRadixCache(params, flags, tiers, accounts)
    pool.register_layer_transfer_counter(cache.gates)
    if rows is not None:
        rows.register_layer_transfer_counter(cache.gates)
    return HybridServer(cache)


def looked(server: HybridServer, tokens: list[int]) -> tuple[int, int]:
    """What a request would find on the device, and beyond that on the host."""
    req = server.request(tokens)
    Server.match(server, req)
    found = req.prefix_len, req.host_hit_length
    if server.stateful:
        server.leave(req)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_what_left_the_device_comes_back_with_its_window_and_its_state(page: int, kind: str) -> None:
    server = serving(kind, page)
    served(server, list(range(40)), answer=0)
    served(server, [*range(24), *range(60, 92)], answer=0)
    # A prompt that branches off has its snapshot taken there: the copy of that state follows the attention KV's.
    second = 24 if kind != "windows" and page > 1 else 56
    server.evict_all()
    assert looked(server, [*range(40), 7]) == (0, 40)
    # The check after the prefill reads every byte of what was found.
    again = served(server, [*range(40), 7])
    assert again.host_loaded_length == 40
    # Attention KV of the first 24 tokens is there by now, and no window or state at their end.
    third = served(server, [*range(24), *range(60, 92), 1])
    assert third.host_loaded_length == second
    assert server.tiers["host"] == 40 + second
    server.settle()
    server.check()
    assert server.cache.protected_size() == 0
    assert not server.cache.ongoing_load_back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_a_window_or_a_state_that_left_alone_comes_back_beside_the_attention_that_stayed(page: int, kind: str) -> None:
    server = serving(kind, page)
    served(server, list(range(40)), answer=0)
    server.settle()
    # Somebody holds the attention KV, and has left the window and the state.
    node = server.controller.tree.match(list(range(40))).device_node
    lock = server.cache.lock(node, [known for known in (SWA, MAMBA) if known.name.lower() in HELD[kind]])
    server.cache.evict(base.EvictParams(num_tokens=0, swa_num_tokens=40, mamba_num=2))
    server.cache.unlock(lock)
    server.check()
    server.poison()
    assert server.cache.total_size() == 40
    found, on_host = looked(server, [*range(40), 7])
    assert (found + on_host, on_host > 0) == (40, True)
    req = served(server, [*range(40), 7])
    assert req.host_loaded_length == on_host
    server.settle()
    assert 0 < server.controller.meter.counts[TierCount.LOADED_PAGES] <= 40 // page


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_a_second_request_starts_at_once_behind_the_gates(page: int, kind: str) -> None:
    server = serving(kind, page)
    served(server, list(range(40)), answer=0)
    server.evict_all()
    first, second = server.request([*range(40), 1]), server.request([*range(40), 2])
    assert server.match(first) == 40
    (load,) = server.cache.ongoing_load_back
    assert not load.gate.open(0)
    # Nothing has been copied yet, and the prefix is the device's.
    assert server.match(second) == 40
    assert server.tiers == {"device": 40, "host": 40}
    # The first layers' readers have the first group copied, and no other; a state's copy is taken behind its gate.
    server.allocator.get_kvcache().get_key_buffer(len(RECURRENT))
    assert (load.gate.open(0), load.gate.open(LAST - 15)) == (True, True)
    assert not load.gate.open(9)
    for req in (first, second):
        req.lock = server.cache.lock(req.last_node)
        req.extend_end = len(req.full_untruncated_fill_ids)
        server.running.append(req)
        server.extend(req)
    server.check()
    server.settle()
    for req in (first, second):
        server.finish(req)
        server.check()


@pytest.mark.parametrize("kind", ["states", "both"])
def test_a_load_without_a_slot_for_the_requests_own_state_is_declined(kind: str) -> None:
    server = serving(kind, 1)
    served(server, list(range(40)), answer=0)
    server.evict_all()
    slots = server.rows.mamba_allocator
    held = slots.alloc(slots.available_size() - 1)
    req = server.request([*range(40), 1])
    assert server.match(req) == 0
    assert (req.host_loaded_length, req.kv.holds_mamba) == (0, False)
    slots.free(held)
    server.settle()
    server.check()
    # It was loaded all the same, for the next one.
    assert looked(server, [*range(40), 2]) == (40, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_a_node_that_is_split_while_it_is_written_through_is_on_the_host_whole(page: int, kind: str) -> None:
    """sglang#16946."""
    server = serving(kind, page)
    served(server, list(range(40)), answer=0)
    assert server.cache.ongoing_write_through
    served(server, [*range(24), *range(60, 84)], answer=0)
    served(server, [*range(8), *range(90, 98)], answer=0)
    server.evict_all()
    branched = kind != "windows" and page > 1
    for prompt, tokens in (
        ([*range(41)], 40),
        ([*range(24), *range(60, 85)], 24 if branched else 48),
        ([*range(8), *range(90, 99)], 8 if branched else 16),
    ):
        assert looked(server, prompt) == (0, tokens)
        served(server, prompt, answer=0)
        server.evict_all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_storage_outlives_the_server(page: int, kind: str, tmp_path: Path) -> None:
    first = serving(kind, page, root=tmp_path)
    served(first, list(range(40)), answer=0)
    served(first, [*range(24), *range(60, 92)], answer=0)
    shared = 24 if kind != "windows" and page > 1 else 56
    first.settle()
    first.cache.release_host_resources()
    accounts = with_accounts()
    second = serving(kind, page, root=tmp_path, accounts=accounts)
    second.poison()
    req = second.fetch([*range(40), 7])
    assert (req.storage_hit_length, req.storage_hit_start) == (40, 0)
    run(second, req)
    req = second.fetch([*range(24), *range(60, 92), 1])
    run(second, req)
    assert sum(second.tiers.values()) == 40 + shared
    second.settle()
    sums = accounts.ledger.total().first
    assert (sums.storage_tokens + sums.device_tokens, accounts.ledger.faults) == (40 + shared, 0)
    second.check()
    second.cache.release_host_resources()
    accounts.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(2))
def test_a_history_in_little_room_loses_no_page_and_reads_no_other(page: int, seed: int, kind: str) -> None:
    server = serving(kind, page, 192, ratio=2.0)
    history(server, seed, 300)
    assert server.tiers["host"] > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_history_with_storage_loses_no_page(kind: str, tmp_path: Path) -> None:
    server = serving(kind, 4, 192, ratio=1.5, root=tmp_path)
    history(server, 7, 300)
    assert server.controller.meter.counts[TierCount.STORED_PAGES] > 50
    server.cache.release_host_resources()


def test_windows_and_states_that_are_written_back_are_refused(tmp_path: Path) -> None:
    """An eviction copies attention KV alone."""
    publish(tmp_path, hicache_write_policy="write_back", **SNAPSHOTS)
    asked = context_of(params=parameters(4, 64, window=WINDOW_TOKENS), is_hybrid_swa=True)
    with pytest.raises(EngineUnsupported, match="not windows or states written back"):
        sglang_plugin.radix_cache(asked)
    publish(tmp_path, **SNAPSHOTS)
    context.get_server_args()._mamba_cache_chunk_size = CHUNK
    assert sglang_plugin.radix_cache(asked).supports_swa()


@pytest.mark.parametrize(
    ("kind", "option", "odd"),
    [
        ("states", "attn_cp_size", "states of context-parallel ranks (--attn-cp-size, --dcp-size)"),
        ("states", "dcp_size", "states of context-parallel ranks (--attn-cp-size, --dcp-size)"),
        ("windows", "dcp_size", "windows beside tokens that ranks divide (--dcp-size)"),
        ("windows", "attn_cp_size", ""),
    ],
)
def test_what_context_parallel_ranks_do_not_hold_as_attention_does_is_refused(
    kind: str, option: str, odd: str, tmp_path: Path
) -> None:
    server = serving(kind, 4)
    publish(tmp_path, tp_size=2, **{option: 2}, **SNAPSHOTS)
    params = parameters(4, 64, rows=server.rows if kind == "states" else None)
    params.token_to_kv_pool_allocator, params.attn_cp_size = server.allocator, 2 if option == "attn_cp_size" else 1
    assert engine_radix.odd_pools(SimpleNamespace(params=params)) == odd
    publish(tmp_path, **SNAPSHOTS)
    context.get_server_args()._mamba_cache_chunk_size = CHUNK


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_forgotten_at_a_flush(kind: str) -> None:
    server = serving(kind, 4)
    served(server, list(range(40)))
    server.evict_all()
    served(server, list(range(100, 140)))
    server.settle()
    server.cache.reset()
    server.rows.clear()
    server.allocator.clear()
    assert looked(server, [*range(41)]) == looked(server, [*range(100, 141)]) == (0, 0)
    assert server.controller.tree.sizes(tier=Tier.HOST).evictable == 0
    server.check()
    served(server, list(range(40)))
