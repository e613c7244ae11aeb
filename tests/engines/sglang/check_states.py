"""Requests with states over kvmover's prefix tree: slots, copies and snapshots in SGLang's own pools on the CPU.

A forward pass of such a model needs a GPU: SGLang's kernels for it are written for one. What its scheduler does for one
is done here by its own functions: allocation, copies on a match, snapshots of prompts and answers, release.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from check_radix import history, prompts_of
from scheduling import base, context, kinds, parameters, publish, unified
from states import CHUNK, SNAPSHOTS, StateServer, state_rows

from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang import sglang_plugin
from kvmover.engines.sglang.radix_cache import KvmoverRadixCache

#: How SGLang keeps states, and in pages of how many tokens.
MODES = [("none", 1), ("kept", 1), ("kept", 4)]


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish(tmp_path_factory.mktemp("serving"), **SNAPSHOTS)
    context.get_server_args()._mamba_cache_chunk_size = CHUNK


def parameters_of(mode: str, page: int, size: int = 512, slots: int = 64, **more: Any) -> Any:
    rows = state_rows(slots, mode)
    return parameters(page, size, rows=rows, enable_mamba_extra_buffer=mode != "none", **more)


def ours(*args: Any, **more: Any) -> StateServer:
    return StateServer(KvmoverRadixCache(parameters_of(*args, **more)))


def theirs(*args: Any, **more: Any) -> StateServer:
    return StateServer(unified.UnifiedRadixCache(parameters_of(*args, **more)))


def served(server: StateServer, tokens: list[int], answer: int = 3, **more: Any) -> Any:
    req = server.request(tokens, **more)
    assert server.prefill(req)
    for _ in range(answer):
        assert server.decode(req)
        server.check()
    server.finish(req)
    server.check()
    return req


def found(server: StateServer, tokens: list[int]) -> int:
    req = server.request(tokens)
    tokens_found = server.match(req)
    server.leave(req)
    server.check()
    return tokens_found


@pytest.mark.parametrize("page", [1])
def test_without_snapshots_a_prefix_is_found_where_a_request_stopped(page: int) -> None:
    server = ours("none", page)
    req = served(server, list(range(20)), answer=9)
    whole = [*range(20), *req.output_ids]
    # The prompt's end was copied when it was computed, the answer's end was handed over.
    assert [found(server, [*whole[:length], 7]) for length in (19, 20, 28, 29)] == [0, 20, 20, 29]
    assert server.cache.mamba_evictable_size() == 2


@pytest.mark.parametrize("page", [1, 4])
def test_with_snapshots_a_prefix_is_found_at_the_last_one(page: int) -> None:
    server = ours("kept", page)
    req = served(server, list(range(20)), answer=30)
    whole = [*range(20), *req.output_ids]
    # Of the prompt's chunks of 8 tokens two were whole; of the answer one is kept every 16 tokens.
    assert [found(server, [*whole[:length], 7]) for length in (15, 16, 40, 49)] == [0, 16, 16, 48]


def test_a_request_starts_from_a_copy_and_the_tree_keeps_its_state() -> None:
    server = ours("none", 1)
    served(server, list(range(20)), answer=0)
    both = [server.request([*range(20), last, 1, 2]) for last in (50, 60)]
    for req in both:
        assert server.prefill(req)
        server.check()
    assert server.hits == 40
    for req in both:
        server.finish(req)
        server.check()


@pytest.mark.parametrize("page", [1, 4])
def test_a_prompt_that_branches_off_keeps_a_snapshot_for_the_next_one(page: int) -> None:
    """The attention KV of 24 tokens is known, and a state of 40: the third prompt starts where the first two part."""
    for server in (ours("kept", page), theirs("kept", page)):
        served(server, list(range(40)), answer=0)
        served(server, [*range(24), *range(100, 130)], answer=0)
        assert (server.hits, server.branched) == (0, 1)
        served(server, [*range(24), *range(200, 230)], answer=0)
        assert server.hits == 24


@pytest.mark.parametrize(("mode", "page"), MODES)
def test_states_go_alone_oldest_first_and_attention_stays(mode: str, page: int) -> None:
    server = ours(mode, page)
    for turn in (16, 32, 48):
        served(server, [*range(turn)], answer=0)
    assert [found(server, [*range(turn), 9]) for turn in (48, 32, 16)] == [48, 32, 16]
    tokens = server.cache.evictable_size()
    assert server.cache.evict(base.EvictParams(mamba_num=1)).mamba_num_evicted == 1
    server.check()
    assert [found(server, [*range(turn), 9]) for turn in (48, 32, 16)] == [32, 32, 16]
    found(server, [*range(32), 9])
    assert server.cache.evict(base.EvictParams(mamba_num=1)).mamba_num_evicted == 1
    assert [found(server, [*range(turn), 9]) for turn in (32, 16)] == [32, 0]
    assert server.cache.evictable_size() == tokens
    # Who computes it again brings the state again.
    served(server, [*range(48)], answer=0)
    assert found(server, [*range(48), 9]) == (48 if mode == "none" else 40)
    assert server.cache.evictable_size() == tokens


@pytest.mark.parametrize(("mode", "page"), MODES)
def test_a_locked_state_stays_and_a_used_one_goes_later(mode: str, page: int) -> None:
    server = ours(mode, page)
    for head in (0, 100, 200):
        served(server, list(range(head, head + 16)), answer=0)
    running = server.request([*range(16), 7, 7])
    assert server.prefill(running)
    found(server, [*range(100, 116), 7])
    assert server.cache.evict(base.EvictParams(mamba_num=1)).mamba_num_evicted == 1
    assert [found(server, [*range(head, head + 16), 7]) for head in (0, 100, 200)] == [16, 16, 0]
    server.cache.evict(base.EvictParams(mamba_num=100, num_tokens=1000))
    # The request holds the last state that it gave, or the one that it started from.
    assert found(server, [*range(16), 7, 7, 7]) == (18 if mode == "none" else 16)
    server.finish(running)
    server.check()


@pytest.mark.parametrize(("mode", "page"), MODES)
def test_aborted_and_retracted_requests_give_their_slots_back(mode: str, page: int) -> None:
    server = ours(mode, page)
    aborted, retracted = server.request(list(range(40))), server.request(list(range(100, 140)))
    assert server.prefill(aborted, chunk=16)
    assert server.prefill(retracted)
    assert server.decode(retracted)
    server.abort(aborted)
    server.check()
    server.retract(retracted)
    server.check()
    assert (server.cache.mamba_protected_size(), server.cache.protected_size()) == (0, 0)
    assert found(server, list(range(41))) == 16
    assert server.prefill(retracted)
    assert server.hits == 40
    server.finish(retracted)
    server.check()


@pytest.mark.parametrize(("mode", "page"), MODES)
def test_a_match_finds_a_slot_by_giving_up_another_state_than_the_one_it_found(mode: str, page: int) -> None:
    server = ours(mode, page, slots=8)
    for head in (0, 100, 200):
        served(server, list(range(head, head + 16)), answer=0)
    held = server.rows.mamba_allocator.alloc(server.rows.mamba_allocator.available_size())
    req = server.request([*range(16), 7])
    assert server.match(req) == 16
    assert req.kv.holds_mamba
    assert server.cache.mamba_evictable_size() == 2
    server.leave(req)
    server.rows.mamba_allocator.free(held)
    server.check()
    assert [found(server, [*range(head, head + 16), 7]) for head in (0, 100, 200)] == [16, 0, 16]


def test_of_a_request_that_was_cut_short_the_snapshot_before_is_kept() -> None:
    server = ours("kept", 1)
    req = server.request(list(range(20)))
    assert server.prefill(req)
    while req.kv.kv_committed_len < 48:
        assert server.decode(req)
    # The answer ends one token before the last snapshot.
    cut = 47 - 20
    req.finished_reason = SimpleNamespace(to_json=dict)
    req.finished_len = cut
    server._release(req, checkpoint=True)
    server.check()
    whole = [*range(20), *req.output_ids]
    assert [found(server, [*whole[:length], 7]) for length in (48, 40)] == [32, 32]


def test_an_insert_says_whether_the_state_is_the_callers_still() -> None:
    server = ours("none", 1)
    cache, radix = server.cache, unified.RadixKey
    slots = [server.rows.mamba_allocator.alloc(1) for _ in range(2)]
    told = []
    for slot in slots:
        key, value = radix(list(range(8))), server.allocator.alloc(8)
        told.append(cache.insert(base.InsertParams(key=key, value=value, mamba_value=slot)).mamba_exist)
    assert told == [False, True]
    server.rows.mamba_allocator.free(slots[1])
    server.check()
    assert cache.all_mamba_values_flatten().tolist() == slots[0].tolist()


@pytest.mark.parametrize("window", [None, 3], ids=["attention", "windows"])
@pytest.mark.parametrize(("mode", "page"), MODES)
@pytest.mark.parametrize("seed", range(2))
def test_a_history_with_room_for_all_finds_what_sglangs_own_cache_finds(
    mode: str, page: int, seed: int, window: int | None
) -> None:
    servers = [make(mode, page, 16384, 2048, window=window) for make in (ours, theirs)]
    history(list(servers), seed, 300)
    assert servers[0].hits >= servers[1].hits > 50
    assert servers[0].branched == servers[1].branched


@pytest.mark.parametrize("policy", ["lru", "slru", "priority"])
@pytest.mark.parametrize(("mode", "page"), MODES)
@pytest.mark.parametrize("seed", range(2))
def test_a_history_in_little_room_loses_no_slot(mode: str, page: int, seed: int, policy: str) -> None:
    server = ours(mode, page, 512, 32, eviction_policy=policy)
    history([server], seed, 300)
    assert server.hits > 20
    assert server.rows.mamba_allocator.available_size() == 32


@pytest.mark.parametrize(("mode", "page"), MODES)
@pytest.mark.parametrize(("slots", "share"), [(24, 1.0), (2048, 0.98)], ids=["few states", "little attention"])
def test_with_little_room_as_much_is_found_as_by_sglangs_own_cache(
    mode: str, page: int, slots: int, share: float
) -> None:
    """With little attention KV the two give up other leaves: the sums of 1,200 requests differ by 2 % at most."""
    hits = [0, 0]
    for seed in range(12):
        for place, make in enumerate((ours, theirs)):
            server = make(mode, page, 640 if slots > 24 else 8192, slots)
            chance = random.Random(seed)
            prompts = prompts_of(chance)
            for _ in range(100):
                req = server.request(next(prompts))
                assert server.prefill(req)
                for _ in range(chance.randrange(6)):
                    assert server.decode(req)
                server.finish(req)
            server.check()
            hits[place] += server.hits
    assert hits[0] >= share * hits[1] > 600, hits


def context_of(rows: Any, **more: Any) -> Any:
    told = {
        "params": parameters(1, 64, rows=rows, **more),
        "disable_radix_cache": False,
        "enable_hierarchical_cache": False,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": True,
        "full_tokens_per_layer": 64,
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(prefill_aware_swa=False)),
    }
    return SimpleNamespace(**told)


def test_the_factory_makes_a_cache_with_states() -> None:
    cache = sglang_plugin.radix_cache(context_of(state_rows(8, "none")))
    assert (cache.supports_mamba(), cache.supports_swa()) == (True, False)
    assert kinds.ComponentType.MAMBA


def test_states_that_are_kept_otherwise_are_refused_in_a_sentence() -> None:
    class OtherRows(type(state_rows(8, "none"))):  # type: ignore[misc]
        pass

    rows = state_rows(8, "none")
    rows.__class__ = OtherRows
    with pytest.raises(EngineUnsupported, match="not in OtherRows"):
        sglang_plugin.radix_cache(context_of(rows))
    rows = state_rows(8, "none")
    rows.mamba_ckpt_pool = object()
    with pytest.raises(EngineUnsupported, match="in eight bits"):
        sglang_plugin.radix_cache(context_of(rows))
