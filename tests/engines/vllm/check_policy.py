"""HazardPolicy in vLLM's own CPUOffloadingManager: which chunks stay, which may not go, and that none is lost."""

# vLLM is in its engine's own environment, which no type checker looks into.
# pyright: reportMissingImports=false

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvmover.cache.prefix import chain
from kvmover.engines.vllm.vllm_contract import PEER_TIER, VLLM
from tests.cache.prefix.test_hazard import DEVICE_PAGES, conversations

POLICIES = {"lru": None, "LendingPolicy": "kvmover.engines.vllm", "HazardPolicy": "kvmover.engines.vllm"}

_ids = count()

VLLM.require(PEER_TIER)


def manager_of(policy: str, chunks: int = DEVICE_PAGES) -> Any:
    return CPUOffloadingManager(chunks, cache_policy=policy, cache_policy_module_path=POLICIES[policy])


def keys_of(prompt: list[int]) -> tuple[ReqContext, list[OffloadKey]]:
    context = ReqContext(f"r{next(_ids)}")
    keys = [make_offload_key(page, 0) for page in chain(b"", prompt, 1)]
    for end, key in enumerate(keys, 1):
        context.set_offload_key_position(key, end)
    return context, keys


def served(manager: Any, prompt: list[int]) -> int:
    """The chunks at the beginning of a prompt that are here. They are loaded, and the others stored."""
    context, keys = keys_of(prompt)
    manager.on_new_request(context)
    hits = next((at for at, key in enumerate(keys) if manager.lookup(key, context) is LookupResult.MISS), len(keys))
    manager.prepare_load(keys[:hits], context)
    manager.complete_load(keys[:hits], context)
    if manager.prepare_store(keys, context) is not None:
        manager.complete_store(keys, context)
    manager.on_request_finished(context)
    return hits


def test_conversations_that_go_on_stay_and_others_go() -> None:
    hits = dict.fromkeys(POLICIES, 0)
    for name in POLICIES:
        manager = manager_of(name)
        hits[name] = sum(served(manager, prompt) for prompt in conversations(1, 2000))
        assert len(manager._policy.chunks) <= DEVICE_PAGES
    assert hits["LendingPolicy"] == hits["lru"]
    assert hits["HazardPolicy"] > 1.2 * hits["lru"]


def test_no_chunk_that_is_read_goes_and_too_few_is_none_at_all() -> None:
    manager = manager_of("HazardPolicy", 8)
    served(manager, [1, 2, 3, 4])
    served(manager, [5, 6, 7, 8])
    context, reading = keys_of([5, 6, 7, 8])
    manager.prepare_load(reading, context)
    asked, wanted = keys_of([11, 12, 13, 14, 15])
    assert manager.prepare_store(wanted, asked) is None
    assert [manager.lookup(key, context) for key in reading] == [LookupResult.HIT] * 4
    asked, wanted = keys_of([21, 22, 23, 24])
    _, old = keys_of([1, 2, 3, 4])
    assert set(manager.prepare_store(wanted, asked).evicted_keys) == set(old)
    manager.complete_load(reading, context)
    manager.complete_store(wanted, asked, success=False)
    assert served(manager, [5, 6, 7, 8]) == 4
    assert served(manager, [21, 22, 23, 24]) == 0


def test_chunks_of_a_request_under_way_go_last_and_a_reset_forgets_all() -> None:
    manager = manager_of("HazardPolicy", 8)
    running, keys = keys_of([1, 2, 3, 4])
    manager.prepare_store(keys, running)
    manager.complete_store(keys, running)
    served(manager, [5, 6, 7, 8])
    asked, wanted = keys_of([11, 12, 13, 14, 15])
    gone = manager.prepare_store(wanted, asked).evicted_keys
    assert gone[-1] == keys[-1]
    assert len(gone) == 5
    manager.reset_cache()
    assert served(manager, [1, 2, 3, 4]) == 0
    assert served(manager, [1, 2, 3, 4]) == 4


@pytest.mark.parametrize("seed", range(4))
def test_a_history_in_little_room_loses_no_chunk(seed: int) -> None:
    chance, manager = random.Random(seed), manager_of("HazardPolicy", 40)
    under_way = list[tuple[ReqContext, list[OffloadKey]]]()
    for _ in range(600):
        context, keys = keys_of([chance.randrange(3), *(chance.randrange(3) for _ in range(chance.randrange(1, 12)))])
        manager.on_new_request(context)
        hits = next((at for at, key in enumerate(keys) if manager.lookup(key, context) is not LookupResult.HIT), 0)
        manager.prepare_load(keys[:hits], context)
        under_way.append((context, keys[:hits]))
        if (placed := manager.prepare_store(keys, context)) is not None:
            manager.complete_store(placed.keys_to_store, context, success=chance.random() < 0.9)
        while len(under_way) > chance.randrange(4):
            context, loaded = under_way.pop(chance.randrange(len(under_way)))
            manager.complete_load(loaded, context)
            manager.on_request_finished(context)
        rows = [chunk.chunk_id for chunk in manager._policy.chunks.values()]
        assert sorted(rows + manager._free_list) == list(range(manager._num_allocated_chunks))
        assert len(rows) == len(manager._policy._order) + len(manager._policy._fresh)
