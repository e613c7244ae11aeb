"""Hybrid models behind SGLang's hybrid controller: index keys beside a latent, states and windows beside attention."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import PAGE, Rank, Shape, assembler, hosts, hybrid, keys_of, pools, ranks, storage

TOKENS = list(range(7, 7 + 5 * PAGE))
POISON = 0x5A

configs: Any = import_module("sglang.srt.mem_cache.hybrid_cache.host_pool_config")
infos: Any = import_module("sglang.srt.mem_cache.device_pool_info")
mamba: Any = import_module("sglang.srt.mem_cache.pool_host.mamba")
handles: Any = import_module("sglang.srt.mem_cache.base_prefix_cache")

KV, MAMBA, SWA, INDEXER = (getattr(storage.PoolName, name) for name in ("KV", "MAMBA", "SWA", "INDEXER"))
TRAILING = storage.PoolHitPolicy.TRAILING_PAGES


@dataclass
class Stack:
    """A hybrid controller, and the buffers of its pools by name."""

    controller: Any
    buffers: dict[str, list[torch.Tensor]]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffers in self.buffers.values():
            for buffer in buffers:
                raw = buffer.view(-1).view(torch.uint8)
                raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))

    def poison(self) -> None:
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer.view(-1).view(torch.uint8).fill_(POISON)

    def pages(self, name: Any, indices: torch.Tensor) -> list[bytes]:
        """The bytes of pages of a pool, as the engine takes them out of it."""
        pool = self.controller.mem_pool_host.entry_map[name].host_pool
        size = pool.page_size
        return [
            bytes(pool.get_data_page(index, flat=True).contiguous().view(torch.uint8).numpy())
            for index in indices[::size].tolist()
        ]


def entry(name: Any, host: Any, device: Any) -> Any:
    layers = {layer: layer for layer in range(host.layer_num if hasattr(host, "layer_num") else host.num_mamba_layers)}
    return assembler.build_pool_entry(
        name=name,
        host_pool=host,
        device_pool=device,
        layer_mapping=layers,
        transfer_layer_id_max=len(layers),
        is_anchor=name == KV,
    )


def attention_with(rank: Rank, *sides: str) -> Any:
    """Attention, and of `sides` a Mamba state and a sliding window."""
    device = rank.device_pool()
    entries = [entry(KV, rank.host_pool(device), device)]
    if "mamba" in sides:
        temporal = torch.zeros(2, 16, 8 // rank.shape.tp, 4, 4)
        conv = torch.zeros(2, 16, 24 // rank.shape.tp, 3, dtype=torch.bfloat16)
        info = infos.MambaStateBufferInfo(temporal=temporal, conv=(conv,))
        host = mamba.MambaPoolHost(info, 2.0, 0, device_capacity=16, pin_memory=False, layout=rank.shape.layout)
        entries.append(entry(MAMBA, host, None))
    if "swa" in sides:
        device = rank.device_pool()
        entries.append(entry(SWA, rank.host_pool(device), device))
    return hosts.HostPoolGroup(entries)


def sparse(rank: Rank) -> Any:
    """A latent with index keys, by the engine's own declarations."""
    device = pools.DSATokenToKVPool(
        4 * 64, 64, 16, torch.bfloat16, 8, 4, "cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=24
    )
    config = configs.prepare_host_pool_config(
        decls=device.host_pool_decls(),
        full_layer_mapping={layer: layer for layer in range(4)},
        transfer_layer_id_max=4,
        transfer_page_size=64,
    )
    return assembler.build_host_pool_group(config=config)


def stack(rank: Rank, group: Any, **options: Any) -> Stack:
    anchor = group.anchor_entry
    device = anchor.device_pool
    controller = hybrid.HybridCacheController(
        SimpleNamespace(get_kvcache=lambda: device),
        group,
        anchor.host_pool.page_size,
        rank.group,
        threading.Event(),
        io_backend="kernel",
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="the model",
        storage_backend_extra_config=rank.options(**options),
    )
    buffers = {}
    for each in group.entries:
        each.host_pool.pin_memory = False
        buffers[each.name] = each.host_pool.get_hybrid_pool_buffer() if each.name != KV else [each.host_pool.kv_buffer]
    return Stack(controller, buffers)


def save(of: Stack, indices: torch.Tensor, tokens: list[int], keys: list[str], sides: list[Any]) -> Any:
    of.controller.write_storage(indices, tokens, keys, extra_pools=sides)
    return of.controller.ack_backup_queue.get(timeout=60)


def load(of: Stack, tokens: list[int], sides: list[Any], slots: dict[Any, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """As the tree does: look up, take host memory for what hit, read. `slots`: memory for the side pools."""
    controller = of.controller
    controller.prefetch(handles.CacheRequestHandle("request", 0), tokens, extra_pools=sides)
    operation = controller.prefetch_hit_queue.get(timeout=60)
    operation.host_indices = controller.mem_pool_host.alloc(max(controller.page_size, operation.storage_hit_count))
    for side in operation.pool_transfers:
        if side.name in slots:
            side.host_indices = slots[side.name]
    controller._resolve_sidecar_kv_derived_pool_transfers(operation)
    controller.prefetch_buffer.put(operation)
    completed = 0
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=60)
        completed = ack.completed_tokens or completed
        if ack.completed_req:
            return operation, operation.host_indices[:completed]


def transfer(name: Any, indices: Any = None, keys: Any = None, policy: Any = TRAILING) -> Any:
    return storage.PoolTransfer(name=name, host_indices=indices, keys=keys, hit_policy=policy)


def derived() -> Any:
    policy = storage.PoolHitPolicy.ALL_PAGES
    return storage.PoolTransfer(name=INDEXER, hit_policy=policy, indices_from_pool=KV)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("tp", [1, 2])
def test_index_keys_travel_with_the_latent(layout: str, tp: int, tmp_path: Path) -> None:
    ranks(Shape(layout, "mla", tp=tp), tmp_path, index_keys)


def index_keys(rank: Rank) -> None:
    """Pages of 64 tokens: the index keys of a page come first, then their scales, so a page is one row a layer."""
    tokens = list(range(3 * 64))
    of = stack(rank, sparse(rank))
    of.fill(1)
    indices = of.controller.mem_pool_host.alloc(len(tokens))
    keys = keys_64(tokens)
    expected = {name: of.pages(name, indices) for name in (KV, INDEXER)}
    assert save(of, indices, tokens, keys, [derived()]).completed_tokens == (0 if rank.tp else len(tokens))
    torch.distributed.barrier()
    of.poison()
    operation, indices = load(of, tokens, [derived()], {})
    assert operation.storage_hit_count == len(tokens) == len(indices)
    assert {name: of.pages(name, indices) for name in (KV, INDEXER)} == expected
    of.controller.storage_backend.close()


def keys_64(tokens: list[int]) -> list[str]:
    return import_module("sglang.srt.mem_cache.utils").get_storage_hash_str(tokens, None, page_size=64)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_state_is_restored_at_the_boundary_where_it_was_stored(layout: str, tp: int, tmp_path: Path) -> None:
    ranks(Shape(layout, tp=tp), tmp_path, states)


def states(rank: Rank) -> None:
    """Attention of five pages, and a state after the second alone: a prefix of two, not of five and not of one."""
    of = stack(rank, attention_with(rank, "mamba"))
    of.fill(rank.tp)
    host = of.controller.mem_pool_host
    indices, slot = host.alloc(len(TOKENS)), host.entry_map[MAMBA].host_pool.alloc(1)
    keys = keys_of(TOKENS)
    attention, state = of.pages(KV, indices), of.pages(MAMBA, slot)
    save(of, indices[: 2 * PAGE], TOKENS[: 2 * PAGE], keys[:2], [transfer(MAMBA, slot, [keys[1]])])
    save(of, indices[2 * PAGE :], TOKENS[2 * PAGE :], keys[2:], [])
    torch.distributed.barrier()
    of.poison()
    slot = host.entry_map[MAMBA].host_pool.alloc(1)
    operation, indices = load(of, TOKENS, [transfer(MAMBA, keys=["__placeholder__"])], {MAMBA: slot})
    assert operation.storage_hit_count == 2 * PAGE
    assert of.pages(KV, indices) == attention[:2]
    assert of.pages(MAMBA, slot) == state
    of.controller.storage_backend.close()


def test_ranks_settle_for_a_prefix_that_all_of_them_can_restore(tmp_path: Path) -> None:
    ranks(Shape(tp=2), tmp_path, uneven)


def uneven(rank: Rank) -> None:
    """Rank 0 has states after pages 2 and 4, rank 1 after 2 and 5: the least of both longest would be 4."""
    of = stack(rank, attention_with(rank, "mamba"))
    of.fill(rank.tp)
    host = of.controller.mem_pool_host
    indices, slots = host.alloc(len(TOKENS)), host.entry_map[MAMBA].host_pool.alloc(2)
    keys, held = keys_of(TOKENS), ([1, 3], [1, 4])[rank.tp]
    state = of.pages(MAMBA, slots)
    save(of, indices, TOKENS, keys, [transfer(MAMBA, slots, [keys[page] for page in held])])
    torch.distributed.barrier()
    of.poison()
    operation, _ = load(of, TOKENS, [transfer(MAMBA, keys=["__placeholder__"])], {MAMBA: slots[:1]})
    assert operation.storage_hit_count == 2 * PAGE
    assert of.pages(MAMBA, slots[:1]) == state[:1]
    of.controller.storage_backend.close()


def test_a_window_needs_its_last_pages_only(tmp_path: Path) -> None:
    ranks(Shape("page_first", tp=2), tmp_path, window)


def window(rank: Rank) -> None:
    """The window is two pages; its first page of five was never stored, and nobody asks for it."""
    of = stack(rank, attention_with(rank, "swa", "mamba"))
    of.fill(rank.tp)
    host = of.controller.mem_pool_host
    swa, slot = host.entry_map[SWA].host_pool, host.entry_map[MAMBA].host_pool.alloc(1)
    indices, held, keys = host.alloc(len(TOKENS)), swa.alloc(4 * PAGE), keys_of(TOKENS)
    expected = of.pages(SWA, held)[2:], of.pages(MAMBA, slot)
    sides = [transfer(SWA, held, keys[1:]), transfer(MAMBA, slot, [keys[4]])]
    assert save(of, indices, TOKENS, keys, sides).completed_tokens == len(TOKENS)
    torch.distributed.barrier()
    of.poison()
    held = swa.alloc(2 * PAGE)
    asked = [transfer(SWA, keys=["a", "b"]), transfer(MAMBA, keys=["c"])]
    operation, _ = load(of, TOKENS, asked, {SWA: held, MAMBA: slot})
    assert operation.storage_hit_count == len(TOKENS)
    assert (of.pages(SWA, held), of.pages(MAMBA, slot)) == expected
    of.controller.storage_backend.close()


def test_side_pools_of_other_shapes_are_not_mixed_up(tmp_path: Path) -> None:
    """A state is stored by rank: one rank of one cannot restore what two ranks wrote, and says so."""
    ranks(Shape(tp=2), tmp_path, states)
    assert ranks(Shape(), tmp_path, restorable) == [0]


def restorable(rank: Rank) -> int:
    of = stack(rank, attention_with(rank, "mamba"))
    keys = keys_of(TOKENS)
    found = of.controller.storage_backend.batch_exists_v2(keys, [transfer(MAMBA, keys=["x"])])
    assert of.controller.storage_backend.batch_exists(keys) == len(keys)
    of.controller.storage_backend.close()
    return found.kv_hit_pages
