"""What the prefill/decode backend and the linker read of SGLang's pools, without SGLang."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.engines.sglang.devicepool import check_addresses, placement_of, strands_of
from kvmover.engines.sglang.page_parts import TpPlacement, part_of_rows
from kvmover.engines.sglang.pd_aux import AuxRows
from kvmover.engines.sglang.pd_cache import (
    CacheTotals,
    RankCache,
    caches_of,
    chunk_table,
    page_table,
    pool_of,
    refuse,
    tensor_at,
)
from kvmover.engines.sglang.pd_driver import (
    Answer,
    Bell,
    Call,
    Message,
    PagesReady,
    TransferDriver,
    Wanted,
    frames,
    read,
)
from kvmover.engines.sglang.sglang_contract import LINKER
from kvmover.engines.sglang.sglang_options import ModelFacts
from kvmover.errors import PeerUnknown, PlanError
from kvmover.transfer import Content, Gate, Pace
from kvmover.transfer.meter import UNBEGUN, Meter
from tests.transfer.mover_fleets import Pair

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
SHARDED = TpPlacement.SHARDED
CONTEXT = SimpleNamespace(attn_cp_size=1, enable_cp_tp_group_sharing=False)
ATTENTION = CacheTotals(2, 2 * HEADS)


def told(buffers: list[torch.Tensor], **more: Any) -> Any:
    """`KVArgs` of pages [token, head, dim], with nothing beside them but what is given."""
    args = SimpleNamespace(
        kv_data_ptrs=[buffer.data_ptr() for buffer in buffers],
        kv_data_lens=[buffer.nbytes for buffer in buffers],
        kv_item_lens=[buffer[0].nbytes * PAGE for buffer in buffers],
        page_size=PAGE,
        kv_cache_dtype_str="bfloat16",
        state_types=[],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        state_layer_ids=[],
        state_dim_per_tensor=[],
        state_slice_outer_counts=[],
        state_conv_shard_groups=[],
        swa_kv_cache_layout=None,
        is_hybrid_mla_backend=False,
        num_draft_entries=0,
        mla_compression_ratios=None,
    )
    vars(args).update(more)
    return args


def with_states(args: Any, kind: str, buffers: list[torch.Tensor], pages: int = 1, **cuts: Any) -> Any:
    """Another component of states: buffers [state, ...], or [slot, ...] with pages of `pages` slots."""
    args.state_types.append(kind)
    args.state_data_ptrs.append([buffer.data_ptr() for buffer in buffers])
    args.state_data_lens.append([buffer.nbytes for buffer in buffers])
    args.state_item_lens.append([buffer[0].nbytes * pages for buffer in buffers])
    for field in ("layer_ids", "dim_per_tensor", "slice_outer_counts", "conv_shard_groups"):
        getattr(args, f"state_{field}").append(cuts.get(field, []))
    return args


def attention(dim: int = DIM, layers: int = LAYERS) -> list[torch.Tensor]:
    return [torch.randint(-99, 99, (5 * PAGE, HEADS, dim)).to(torch.bfloat16) for _ in range(layers)]


def test_the_planes_of_a_pool_are_the_engines_buffers() -> None:
    """K of every layer, then V, as SGLang lists them; a plane a layer and K/V, as kvmover asks for them."""
    buffers = attention() + attention()
    (cache,) = caches_of(told(buffers), ATTENTION, ParallelRank(1, 2))
    assert (cache.layers, cache.heads, cache.row_bytes) == (LAYERS, 2 * HEADS, 2 * DIM)
    pool = pool_of(cache, cache.component(LAYERS), PAGE, torch.device("cpu"))
    for layer in range(LAYERS):
        for kv in range(2):
            plane = pool.plane(layer, kv).reshape(5 * PAGE, HEADS, 2 * DIM)
            assert torch.equal(plane, buffers[kv * LAYERS + layer].view(torch.uint8))


def test_keys_and_values_of_different_dims_are_caches_of_their_own() -> None:
    buffers = attention(DIM) + attention(2 * DIM)
    caches = caches_of(told(buffers), ATTENTION, ParallelRank(1, 2))
    assert [(cache.name, cache.kv, cache.row_bytes) for cache in caches] == [
        ("kv bfloat16 k", 1, 2 * DIM),
        ("kv bfloat16 v", 1, 4 * DIM),
    ]
    assert [cache.pointers for cache in caches] == [
        tuple(buffer.data_ptr() for buffer in half) for half in (buffers[:LAYERS], buffers[LAYERS:])
    ]


def test_a_draft_model_with_layers_like_the_models_is_a_cache_beside_its_own() -> None:
    buffers = attention() + attention()
    drafts = attention(layers=2)
    cache, draft = caches_of(told(buffers + drafts, num_draft_entries=2), ATTENTION, ParallelRank(0, 2))
    assert (cache.layers, draft.layers, draft.name, draft.by) == (LAYERS, 1, "draft bfloat16", None)
    other = told(buffers + attention(2 * DIM, 2), num_draft_entries=2)
    with pytest.raises(EngineUnsupported, match=r"no configuration: pages of \[256\] and the model's of \[128\] bytes"):
        caches_of(other, ATTENTION, ParallelRank(0, 2))
    ours = replace(ATTENTION, draft=CacheTotals(2, HEADS * 2))
    draft = caches_of(other, ours, ParallelRank(0, 2))[1]
    assert (draft.heads, draft.own_heads, draft.row_bytes, draft.layers) == (2 * HEADS, HEADS, 4 * DIM, 1)


def test_a_convolution_is_cut_along_each_projection_and_its_planes_are_the_engines_bytes() -> None:
    """2 layers of q, k, v of 4, 4 and 8 channels on 2 ranks, 3 steps inside (GDN), then a temporal state of 2 heads."""
    conv = torch.arange(2 * 5 * 8 * 3, dtype=torch.int16).reshape(2, 5, 8, 3)
    temporal = torch.arange(2 * 5 * 2 * 6, dtype=torch.float32).reshape(2, 5, 2, 6)
    cuts = {
        "layer_ids": [1, 4, 1, 4],
        "dim_per_tensor": [8, 8, 2, 2],
        "slice_outer_counts": [1, 1, 1, 1],
        "conv_shard_groups": [[4, 4, 8], [4, 4, 8], None, None],
    }
    args = with_states(told(attention() + attention()), "mamba", [*conv, *temporal], **cuts)
    q, k, v, state = caches_of(args, ATTENTION, ParallelRank(1, 2))[1:]
    assert [(cache.heads, cache.own_heads, cache.row_bytes) for cache in (q, k, v, state)] == [
        (4, 2, 6),
        (4, 2, 6),
        (8, 4, 6),
        (4, 2, 24),
    ]
    for cache, wanted in ((q, conv[:, :, :2]), (k, conv[:, :, 2:4]), (v, conv[:, :, 4:]), (state, temporal)):
        pool = pool_of(cache, cache.component(2), PAGE, torch.device("cpu"))
        for layer in range(2):
            plane = pool.plane(layer, 0).reshape(5, -1)
            assert torch.equal(plane, wanted[layer].reshape(5, -1).contiguous().view(torch.uint8))


def test_a_convolution_with_its_steps_outermost_has_them_as_planes() -> None:
    """Kimi: [step, channel]; q, k, v of 2, 2 and 4 channels of this one of 2 ranks."""
    conv = torch.arange(5 * 3 * 8, dtype=torch.int16).reshape(5, 3, 8)
    cuts = {"layer_ids": [0], "dim_per_tensor": [8], "slice_outer_counts": [3], "conv_shard_groups": [[4, 4, 8]]}
    args = with_states(told(attention() + attention()), "mamba", [conv], **cuts)
    caches = caches_of(args, ATTENTION, ParallelRank(0, 2))[1:]
    for cache, channels in zip(caches, (slice(0, 2), slice(2, 4), slice(4, 8)), strict=True):
        pool = pool_of(cache, cache.component(1), PAGE, torch.device("cpu"))
        for step in range(3):
            plane = pool.plane(0, step).reshape(5, -1)
            assert torch.equal(plane, conv[:, step, channels].contiguous().view(torch.uint8))


def test_a_convolution_of_unknown_groups_is_cut_by_rank_and_a_replicated_state_not_at_all() -> None:
    conv, own, shared = (torch.zeros(5, width, dtype=torch.int16) for width in (24, 8, 6))
    cuts = {
        "layer_ids": [0, 0, 0],
        "dim_per_tensor": [8, 4, 0],
        "slice_outer_counts": [1, 1, 1],
        "conv_shard_groups": [None, None, None],
    }
    args = with_states(told(attention() + attention()), "mamba", [conv, own, shared], **cuts)
    found = [(cache.name, cache.heads, cache.own_heads) for cache in caches_of(args, ATTENTION, ParallelRank(1, 2))[1:]]
    assert found == [("state 0, one of 2 ranks", 2, 1), ("state 1.0", 8, 4), ("state 2", 1, 1)]


@pytest.mark.parametrize(("page_tokens", "window"), [(4, 8), (4, 6), (4, 1), (1, 5), (64, 128)], ids=str)
def test_whatever_the_length_a_windows_table_names_the_pages_that_sglang_tells(page_tokens: int, window: int) -> None:
    """For each length and prefix: the engine's own choice of pages; what the component wants lies in them, be it the
    window's tokens, or whole pages."""
    by_page = (-(-window // page_tokens) + 1) * page_tokens
    cache = RankCache("window", (0,), 999, 1, 1, window=window, by=0)
    component, whole = cache.component(1), replace(cache, window=by_page).component(1)
    for prefix in range(3):
        for tokens in range(prefix * page_tokens + 1, prefix * page_tokens + 2 * window + 2 * page_tokens):
            pages = -(-tokens // page_tokens)
            first = max(prefix * page_tokens, tokens - window) // page_tokens
            own = np.arange(first, pages) + 100
            table = page_table(cache, prefix, np.arange(prefix, pages), [own], page_tokens)
            assert table.tolist() == [100 + max(page, first) for page in range(pages)]
            for wanted in (
                component.wanted(range(prefix * page_tokens, tokens)),
                whole.wanted(range(prefix * page_tokens, pages * page_tokens)),
            ):
                named = {int(table[position // page_tokens]) for position in wanted}
                assert named == {100 + page for page in range(first, pages)}


def test_a_state_has_a_page_table_of_its_own_and_index_keys_skip_the_prefix() -> None:
    state, keys = RankCache("s", (0,), 9, 1, 1, states=1, by=1), RankCache("i", (0,), 9, 1, 1, by=0)
    pages, told_of = np.array([7, 8]), [np.array([5, 6], np.int32), [np.array(3)]]
    assert page_table(state, 1, pages, told_of, PAGE).tolist() == [3]
    assert page_table(keys, 1, pages, told_of, PAGE).tolist() == [5, 5, 6]


@pytest.mark.parametrize("sizes", [(5,), (1, 4), (0, 2, 3), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("prefix", [0, 3])
def test_the_chunks_of_a_prefill_name_the_pages_of_the_whole(sizes: tuple[int, ...], prefix: int) -> None:
    caches = [
        RankCache("kv", (0,), 99, 1, 1),
        RankCache("window", (0,), 99, 1, 1, window=2 * PAGE, by=0),
        RankCache("state", (0,), 99, 1, 1, states=1, by=1),
    ]
    pages, states = np.arange(40, 40 + sum(sizes)), [[43, 44], [7]]
    for cache in caches:
        told, before = list[int](), None
        for number, size in enumerate(sizes):
            first, last = before or 0, number + 1 == len(sizes)
            chunk = pages[first : first + size]
            told += chunk_table(cache, prefix, before, chunk, states if last else None, PAGE).tolist()
            before = first + size
        whole = page_table(cache, prefix, pages, states, PAGE).tolist()
        assert told[prefix * (cache.by is None) :] == whole[prefix * (cache.by is None) :]
        assert len(told) == len(whole)


@pytest.mark.parametrize(
    ("cache", "own"),
    [
        (RankCache("kv", (0,), 9, 1, 1, by=0), [1, 2, 3, 4]),
        (RankCache("state", (0,), 9, 1, 1, states=1, by=0), []),
        (RankCache("state", (0,), 9, 1, 1, states=1, by=0), [1, 2]),
        (RankCache("window", (0,), 9, 1, 1, window=PAGE, by=0), [1, 2, 3]),
    ],
    ids=str,
)
def test_indices_that_cannot_be_of_the_request_are_refused(cache: RankCache, own: list[int]) -> None:
    with pytest.raises(PlanError, match=f"{len(own)} indices of '{cache.name}'"):
        page_table(cache, 0, np.arange(3), [np.array(own)], PAGE)


def test_pages_that_are_no_whole_rows_are_refused() -> None:
    with pytest.raises(EngineUnsupported, match="60 bytes are not 4 tokens x 2 heads"):
        caches_of(told([torch.zeros(8, 3, 5, dtype=torch.uint8)] * 2), CacheTotals(2, 2), ParallelRank(0, 1))


@pytest.mark.parametrize(
    ("changed", "context", "word"),
    [
        ({"state_types": ["dsv4_c128", "mamba", "ring"]}, {}, "kinds: dsv4_c128, ring"),
        ({"kv_cache_dtype_str": "nvfp4"}, {}, "a cache in nvfp4, whose scales SGLang does not hand over"),
        ({}, {"enable_cp_tp_group_sharing": True}, "cut over context-parallel ranks"),
        ({"is_hybrid_mla_backend": True}, {"attn_cp_size": 4}, "on 4 context-parallel ranks"),
    ],
    ids=str,
)
def test_what_is_not_transferred_is_named(changed: dict[str, Any], context: dict[str, Any], word: str) -> None:
    args = told([torch.zeros(8, 1, 8)])
    refuse(args, CONTEXT)
    vars(args).update(changed)
    with pytest.raises(EngineUnsupported, match=word):
        refuse(args, SimpleNamespace(**{**vars(CONTEXT), **context}))


def test_layers_of_different_sizes_are_caches_of_their_own() -> None:
    """Of three layers the second has heads of half the size."""
    keys = [*attention(layers=1), *attention(DIM // 2, 1), *attention(layers=1)]
    values = [*attention(layers=1), *attention(DIM // 2, 1), *attention(layers=1)]
    wide, narrow = caches_of(told(keys + values), ATTENTION, ParallelRank(0, 2))
    assert [(cache.name, cache.layers, cache.kv) for cache in (wide, narrow)] == [
        ("kv bfloat16 of 16 B", 2, 2),
        ("kv bfloat16 of 8 B", 1, 2),
    ]
    assert wide.pointers == tuple(buffer.data_ptr() for buffer in (keys[0], values[0], keys[2], values[2]))


def test_windows_of_unknown_size_or_of_anything_but_keys_and_values_are_refused() -> None:
    args = with_states(told(attention() + attention()), "swa", attention() + attention(), pages=PAGE)
    with pytest.raises(EngineUnsupported, match="size of its sliding window"):
        caches_of(args, ATTENTION, ParallelRank(0, 2))
    with pytest.raises(EngineUnsupported, match="windows of keys and values, not of others"):
        caches_of(args, replace(ATTENTION, window_heads=2 * HEADS, window=6), ParallelRank(0, 2))


def test_pages_that_lie_head_by_head_are_cut_by_head_and_not_looked_into() -> None:
    """A window in AITER's layout, of which a rank of two has 2 heads of 4; 6 tokens reach into 3 pages of 4."""
    pages = [torch.randint(0, 99, (5, HEADS, PAGE * DIM), dtype=torch.uint8) for _ in range(2 * LAYERS)]
    args = with_states(told(attention() + attention(), swa_kv_cache_layout="vectorized_5d"), "swa", pages)
    (cache,) = caches_of(args, replace(ATTENTION, window_heads=2 * HEADS, window=6), ParallelRank(0, 2))[1:]
    component = cache.component(LAYERS)
    assert (component.row_tokens, component.heads, component.window) == (PAGE, 2 * HEADS, 3 * PAGE)
    pool = pool_of(cache, component, PAGE, torch.device("cpu"))
    assert torch.equal(pool.plane(1, 1).reshape(5, HEADS, -1), pages[LAYERS + 1])


def test_pages_that_every_rank_has_are_a_row_each_and_layers_without_any_are_left_out() -> None:
    """Index keys, where the second layer uses what the first found."""
    keys = [torch.zeros(5, 132, dtype=torch.uint8), torch.zeros(0, 132, dtype=torch.uint8)]
    args = told(attention() + attention())
    args.state_types.append("dsa")
    args.state_data_ptrs.append([key.data_ptr() for key in keys])
    args.state_data_lens.append([key.nbytes for key in keys])
    args.state_item_lens.append([132, 0])
    (cache,) = caches_of(args, ATTENTION, ParallelRank(1, 2))[1:]
    assert (cache.name, cache.layers, cache.pages, cache.row_bytes) == ("index keys", 1, 5, 132)
    assert cache.component(1).extent(PAGE * 3) == 3


def test_equal_buffers_before_and_behind_others_are_two_families_of_which_stages_have_a_part_each() -> None:
    rows = [torch.zeros(5, width, dtype=torch.uint8) for width in (8, 6, 8)]
    args = with_states(told(attention() + attention()), "qsa_pending", rows)
    found = [(cache.name, cache.layers) for cache in caches_of(args, ATTENTION, ParallelRank(0, 2))[1:]]
    assert found == [("pending keys of 8 B", 2), ("pending keys of 6 B", 1)]
    with pytest.raises(EngineUnsupported, match="8 bytes of 'pending keys' before and behind others"):
        caches_of(args, ATTENTION, ParallelRank(0, 2, 0, 2))


@pytest.mark.parametrize(("own", "table"), [([], [0]), ([4, 1, 2, 0, 1, 6], [4])], ids=str)
def test_a_row_of_which_nothing_is_pending_is_one_that_no_request_has(own: list[int], table: list[int]) -> None:
    args = with_states(told(attention() + attention()), "dsa_tail", [torch.zeros(5, 8)] * 2)
    (tail,) = caches_of(args, ATTENTION, ParallelRank(0, 2))[1:]
    assert (tail.kv, tail.layers) == (2, 1)
    assert page_table(tail, 0, np.arange(3), [own], PAGE).tolist() == table


def test_a_ring_has_a_row_for_each_position_of_the_window_and_a_short_request_its_first_again() -> None:
    args = with_states(told(attention() + attention()), "swa_ring", [torch.zeros(40, 8)])
    (ring,) = caches_of(args, replace(ATTENTION, window=6), ParallelRank(0, 2))[1:]
    assert ring.component(1).states == 6
    assert page_table(ring, 0, np.arange(9), [[31, 32, 33]], PAGE).tolist() == [31, 31, 31, 31, 32, 33]
    with pytest.raises(PlanError, match="7 indices of 'window ring'"):
        page_table(ring, 0, np.arange(9), [list(range(7))], PAGE)


def test_a_borrowed_tensor_is_the_engines_memory_itself() -> None:
    whole = torch.zeros(64, dtype=torch.uint8)
    tensor_at(whole.data_ptr() + 16, 8, torch.device("cpu")).fill_(7)
    assert whole.tolist() == [0] * 16 + [7] * 8 + [0] * 40


def test_rows_beside_the_cache_travel_as_one_payload() -> None:
    buffers = [torch.arange(40, dtype=torch.uint8).reshape(5, 8), torch.arange(10.0).reshape(5, 2)]
    others = [torch.zeros_like(buffer) for buffer in buffers]
    ours, theirs = (
        AuxRows(SimpleNamespace(aux_data_ptrs=[b.data_ptr() for b in of], aux_item_lens=[b[0].nbytes for b in of]))
        for of in (buffers, others)
    )
    theirs.put(1, ours.take(3))
    for buffer, other in zip(buffers, others, strict=True):
        assert torch.equal(other[1], buffer[3])
        assert not other[[0, 2, 3, 4]].any()
    with pytest.raises(ValueError, match="3 bytes beside the cache; this side's buffers take 16"):
        theirs.put(0, b"abc")


@pytest.mark.parametrize("message", [Call(b"c", ("h", 1), "k"), PagesReady(1 << 62, "r", 2, 64)], ids=repr)
def test_messages_come_back_as_they_were(message: Message) -> None:
    assert read(frames(message)) == message


def test_messages_have_the_tags_that_other_releases_know() -> None:
    messages = Call(b"c", ("h", 1), "k"), Answer("k", "p"), PagesReady(1, "r", 2, 64)
    tags = [msgspec.msgpack.decode(frames(message)[1])["type"] for message in messages]
    assert tags == ["Call", "Answer", "Asked"]


@pytest.mark.parametrize(
    "received",
    [[], [b"KVMOVER"], [b"KVMOVER", b"\xc1"], [b"ABORT", b"7"], [b"KVMOVER", msgspec.msgpack.encode({"type": "Call"})]],
    ids=str,
)
def test_frames_that_are_not_ours_are_left_to_others(received: list[bytes]) -> None:
    assert read(received) is None


class Stub:
    """A mover that does as it is told: `error` is what `receive` raises."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.said: list[str] = []
        self.moves = False
        self.meter = Meter()
        self.transfer = SimpleNamespace(ended=False, quarantined=False, result=None)
        self.connected = frozenset[int]()

    def ranks(self, engine: str) -> frozenset[int]:
        return self.connected

    def poll(self) -> bool:
        return self.moves

    def connect(self, card: bytes) -> None:
        self.said.append("connect")

    def receive(self, *given: Any, content: Content | None) -> Any:
        if self.error:
            raise self.error
        self.said.append(f"receive {given[0]} of {given[1]}")
        return self.transfer

    def send(self, *given: Any, content: Content | None) -> Any:
        return self.transfer

    def abort(self, transfer: Any, reason: str) -> None:
        self.said.append(f"abort: {reason}")

    def refuse(self, request: str, reason: str) -> None:
        self.said.append(f"refuse {request}: {reason}")


PACE = Pace(share=0.5, shortest_s=0.001, open_s=0.125, idle_s=4.0)


def driven(stub: Any, now: list[float]) -> tuple[TransferDriver, list[tuple[int, str | None]]]:
    over: list[tuple[int, str | None]] = []
    return TransferDriver(stub, lambda room, reason, _: over.append((room, reason)), PACE, lambda: now[0]), over


def test_a_request_is_asked_for_once_its_engine_is_known_and_connected() -> None:
    stub, now, engine = Stub(), [0.0], [None, "p", "p"]
    driver, over = driven(stub, now)
    driver.receive(7, Wanted(lambda: engine.pop(0), range(8), [torch.arange(2).numpy()], 0, 10.0))
    driver.turn()
    stub.error = PeerUnknown("rank 1 of p is not connected")
    driver.turn()
    stub.error = None
    driver.turn()
    assert (stub.said, over, driver.has(7)) == (["receive 7 of p"], [], True)


def test_page_tables_of_a_request_that_is_begun_later_may_be_changed_at_once() -> None:
    pair = Pair.of()
    src, dst = (TransferDriver(engine.movers[0], lambda *_: None, PACE) for engine in (pair.src, pair.dst))
    table, others = pair.dst_tables[0][0].copy(), np.arange(0, 64, 2)
    dst.receive(7, Wanted(lambda: "prefill", range(pair.tokens), [table], 0, 1e9))
    table[:] = others[: len(table)]
    for given in (pair.src_tables[0][0].copy(),):
        src.send(7, [given], [Gate(None)], b"first")
        given[:] = others[: len(given)]
    while src.has(7) or dst.has(7):
        src.turn()
        dst.turn()
    pair.assert_landed()


def test_the_prompt_of_a_request_goes_to_the_other_side_which_gives_it_to_nobody_who_means_another() -> None:
    pair, over = Pair.of(), list[tuple[int, str | None]]()
    src = TransferDriver(pair.src.movers[0], lambda *_: None, PACE)
    dst = TransferDriver(pair.dst.movers[0], lambda room, reason, _: over.append((room, reason)), PACE)
    held, other = Content(pair.tokens, b"h" * 16), Content(pair.tokens, b"o" * 16)
    for meant in (other, held):
        dst.receive(7, Wanted(lambda: "prefill", range(pair.tokens), pair.dst_tables[0], 0, 1e9, meant))
        while not src.waiting(7) and not src.has(7):
            src.turn()
            dst.turn()
        if meant is other:
            assert [content for _, _, content in src.waiting(7)] == [other]
            src.send(7, pair.src_tables[0], [Gate(None)], b"first", held)
        while dst.has(7):
            src.turn()
            dst.turn()
    assert over == [(7, f"the KV is of {held}, and {other} were asked for"), (7, None)]
    pair.assert_landed()


def test_an_engine_that_loses_a_rank_is_told_of_once_and_again_when_it_was_back() -> None:
    stub, now, lost = Stub(), [0.0], list[str]()
    driver, _ = driven(stub, now)
    driver.lost = lost.append
    for ranks in ({0, 1}, {0}):
        stub.connected = frozenset[int](ranks)
        driver.turn()
    assert not lost, "nobody has asked it for anything"
    driver.receive(7, Wanted(lambda: "p", range(8), [torch.arange(2).numpy()], 0, 10.0))
    for ranks, told in (({0, 1}, 0), ({0, 1}, 0), ({0}, 1), ({0}, 1), (set(), 2), ({0, 1}, 2), (set(), 3)):
        stub.connected = frozenset[int](ranks)
        driver.turn()
        assert lost == ["p"] * told


@pytest.mark.parametrize(
    ("engine", "error", "reason"),
    [
        (None, None, "the prefill engine has not answered"),
        ("p", PeerUnknown("rank 1 is not connected"), "rank 1 is not connected"),
        ("p", PlanError("no plan"), "no plan"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_asked_for_ends_with_the_reason(
    engine: str | None, error: Exception | None, reason: str
) -> None:
    stub, now = Stub(), [0.0]
    driver, over = driven(stub, now)
    stub.error = error
    driver.receive(7, Wanted(lambda: engine, range(8), [torch.arange(2).numpy()], 0, 10.0))
    driver.turn()
    now[0] = 11.0
    driver.turn()
    assert over == [(7, reason)]
    assert not driver.has(7)
    assert stub.meter.ended == {("receive", UNBEGUN): 1}


def test_a_failure_is_told_when_it_happens_and_its_pages_are_held_for_as_long_as_they_may_be_written() -> None:
    stub, now = Stub(), [0.0]
    driver, over = driven(stub, now)
    driver.receive(7, Wanted(lambda: "p", range(8), [torch.arange(2).numpy()], 0, 10.0))
    driver.turn()
    driver.abort(7, "enough")
    stub.transfer.ended = stub.transfer.quarantined = True
    stub.transfer.result = SimpleNamespace(reason="enough", aux={})
    driver.turn()
    assert (over, driver.has(7)) == ([(7, "enough")], True)
    driver.abort(7, "again")
    driver.turn()
    assert (over, driver.has(7)) == ([(7, "enough")], True)
    stub.transfer.quarantined = False
    driver.turn()
    assert (over, driver.has(7)) == ([(7, "enough")], False)
    assert stub.said == ["receive 7 of p", "abort: enough"]


def test_a_request_that_is_sent_has_failed_when_nothing_reads_its_pages() -> None:
    """A prefill gives the pages of a failed request back as soon as it hears of the failure."""
    stub = Stub()
    driver, over = driven(stub, [0.0])
    driver.send(7, [torch.arange(2).numpy()], [], None)
    stub.transfer.ended = stub.transfer.quarantined = True
    stub.transfer.result = SimpleNamespace(reason="lost", aux={})
    driver.turn()
    assert (over, driver.has(7)) == ([], True)
    stub.transfer.quarantined = False
    driver.turn()
    assert (over, driver.has(7)) == ([(7, "lost")], False)


def test_a_request_that_was_not_begun_is_refused_to_whoever_asks() -> None:
    stub = Stub()
    driver, over = driven(stub, [0.0])
    driver.abort(9, "no")
    assert (stub.said, over) == (["refuse 9: no"], [])


def test_the_thread_of_a_driver_sleeps_as_the_pace_says_since_anything_happened_or_was_called() -> None:
    stub, now, rung = Stub(), [0.0], []
    driver, _ = driven(stub, now)
    driver.wake = lambda: rung.append(now[0])
    now[0] = 0.5
    assert driver.turn() == 0.25  # half of the time since nothing happened
    now[0] = 9.0
    assert driver.turn() == PACE.idle_s
    stub.moves = True
    assert driver.turn() == 0.0
    stub.moves, now[0] = False, 18.0
    driver.receive(7, Wanted(lambda: None, range(8), [torch.arange(2).numpy()], 0, 100.0))
    assert driver.turn() == PACE.shortest_s
    now[0] = 27.0
    assert driver.turn() == PACE.open_s
    for at, call in enumerate([lambda: driver.abort(7, "enough"), lambda: driver.connect(b"card")], 28):
        now[0] = float(at)
        call()
        assert driver.turn() == PACE.shortest_s
    assert rung == [18.0, 28.0, 29.0]


@pytest.fixture
def bell() -> Iterator[tuple[Bell, Any]]:
    """A bell over the reading end of a ZeroMQ socket, and the writing end."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        bell = Bell(pull)
        yield bell, push
        bell.close()


#: Longer than a test may take.
FOR_EVER_S = 10_000.0


def test_a_message_ends_a_nap_and_is_told_until_it_is_taken(bell: tuple[Bell, Any]) -> None:
    ours, push = bell
    assert not ours.nap(0.0)
    assert not ours.nap(0.002)
    push.send(b"message")
    assert [ours.nap(FOR_EVER_S) for _ in range(2)] == [True, True]


def test_a_call_from_another_thread_ends_a_nap_that_has_begun_or_is_to_come(bell: tuple[Bell, Any]) -> None:
    (ours, _), late = bell, threading.Event()
    for _ in range(3):
        ours.ring()
    assert not ours.nap(FOR_EVER_S)

    def call() -> None:
        late.set()
        ours.ring()

    threading.Timer(0.05, call).start()
    assert not ours.nap(FOR_EVER_S)
    assert late.is_set(), "what was rung before has rung twice"


def test_a_bell_that_is_rung_more_often_than_it_can_tell_holds_nobody_up(bell: tuple[Bell, Any]) -> None:
    ours, _ = bell
    for _ in range(10_000):
        ours.ring()
    assert not ours.nap(FOR_EVER_S)


def test_ringing_a_bell_that_is_closed_wakes_nobody(bell: tuple[Bell, Any]) -> None:
    ours, _ = bell
    ours.close()
    ours.ring()


@pytest.mark.parametrize("before", ["landed", "failed"])
def test_a_room_that_comes_again_is_waited_for_whoever_hears_of_it_first(before: str) -> None:
    """Rooms are the router's numbers. Decode asks while the prefill of the second request has not begun."""
    pair, over = Pair.of(), list[tuple[str, int, str | None]]()
    src, dst = (
        TransferDriver(
            engine.movers[0], lambda room, reason, _, name=engine.name: over.append((name, room, reason)), PACE
        )
        for engine in (pair.src, pair.dst)
    )

    def turn(until: int) -> None:
        deadline = time.monotonic() + 20
        while len(over) < until:
            assert time.monotonic() < deadline, over
            src.turn()
            dst.turn()

    def fetch() -> None:
        dst.receive(7, Wanted(lambda: "prefill", range(pair.tokens), pair.dst_tables[0], 0, 1e9))

    src.send(7, pair.src_tables[0], None, b"first")
    if before == "failed":
        src.abort(7, "enough")
        turn(1)
        src.expect(7)
    fetch()
    if before == "landed":
        turn(2)
        fetch()
    waited = len(over)
    for _ in range(20):
        src.turn()
        dst.turn()
    assert len(over) == waited
    src.send(7, pair.src_tables[0], None, b"second")
    turn(waited + 2)
    assert {reason for _, _, reason in over[-2:]} == {None}
    pair.assert_landed()


def entry(kind: str, components: list[list[torch.Tensor]], mapping: dict[int, Any], by_page: bool) -> Any:
    pool = type(kind, (), {})()
    span = 1 if by_page else PAGE
    return SimpleNamespace(
        name="kv", device_pool=pool, components=components, layer_mapping=mapping, page_size=PAGE, _row_span=span
    )


def test_keys_and_values_are_two_planes_of_a_layer() -> None:
    buffers = [torch.zeros(5 * PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    of = entry("MHATokenToKVPool", [buffers], {layer: (layer, LAYERS + layer) for layer in range(LAYERS)}, False)
    (strand,) = strands_of(of, 0, SHARDED)
    assert strand.buffers == (0, 3, 1, 4, 2, 5)
    assert [strand.own(range(1, 3)), strand.own(range(3))] == [[range(1, 3)], [range(3)]]
    part = part_of_rows(strand.rows, ParallelRank(0, 1), ModelFacts(), PAGE)
    assert strand.spec(part.component).allocation_bytes == buffers[0].nbytes
    assert part.nbytes == sum(buffer[:PAGE].nbytes for buffer in buffers)


def told_entry(kind: str, buffers: list[torch.Tensor], told: list[torch.Tensor], page_bytes: int) -> Any:
    """An entry of `buffers` whose pool tells the addresses of `told`, and pages of these bytes."""
    of = entry(kind, [buffers], {0: (0, 1) if len(buffers) > 1 else 0}, False)
    of.device_pool.page_size, of.device_pool.store_dtype = PAGE, buffers[0].dtype
    infos = [each.data_ptr() for each in told], [each.nbytes for each in told], [page_bytes] * len(told)
    of.device_pool.get_contiguous_buf_infos = lambda: infos
    return of


@pytest.mark.parametrize(("kind", "count"), [("MHATokenToKVPool", 2), ("MLATokenToKVPool", 1)])
def test_pages_that_do_not_lie_where_sglang_tells_are_refused_with_both_places(kind: str, count: int) -> None:
    buffers = [torch.zeros(5 * PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(count)]
    page_bytes = buffers[0][:PAGE].nbytes

    def check(of: Any) -> None:
        check_addresses(LINKER, of, strands_of(of, 0, SHARDED)[0])

    check(told_entry(kind, buffers, buffers, page_bytes))
    first = buffers[0].data_ptr()
    name = "K" if count == 2 else "latent"
    stride = re.escape(
        f"kv, layer 0, {name} as ({first + page_bytes}, {page_bytes}, 'bfloat16'); SGLang describes it as"
        f" ({first + 2 * page_bytes}, {2 * page_bytes}, 'bfloat16')"
    )
    with pytest.raises(EngineUnsupported, match=stride):
        check(told_entry(kind, buffers, buffers, 2 * page_bytes))
    other = told_entry(kind, buffers, buffers, page_bytes)
    other.device_pool.store_dtype = torch.float16
    with pytest.raises(EngineUnsupported, match=r"'bfloat16'\); SGLang describes it as .*'float16'\)"):
        check(other)
    swapped = buffers[::-1] if count == 2 else [torch.zeros_like(buffers[0])]
    second = swapped[0].data_ptr()
    with pytest.raises(EngineUnsupported, match=rf"as \({first + page_bytes}, .* as \({second + page_bytes}, "):
        check(told_entry(kind, buffers, swapped, page_bytes))


def test_a_layer_of_the_model_may_wait_for_several_of_a_pools_own() -> None:
    """A draft layer rides with the first layer of the model: two runs."""
    buffers = [torch.zeros(8, 16, dtype=torch.uint8) for _ in range(4)]
    (strand,) = strands_of(entry("X", [buffers], {0: (0, 3), 1: 1, 2: 2}, True), 0, SHARDED)
    assert strand.own(range(1)) == [range(1), range(3, 4)]
    assert strand.own(range(1, 3)) == [range(1, 3)]
    assert strand.own(range(3, 9)) == []


def test_buffers_of_one_shape_are_one_strand_each() -> None:
    temporal = [torch.zeros(9, 4, 4) for _ in range(2)]
    conv = [torch.zeros(9, 6, 3, dtype=torch.bfloat16) for _ in range(2)]
    a, b = strands_of(entry("MambaPool", [temporal, conv], {0: 0, 1: 1}, True), 0, SHARDED)
    assert [(s.rows.name, s.rows.dim, s.rows.states, s.buffers) for s in (a, b)] == [
        ("kv.0", 64, 1, (0, 1)),
        ("kv.1", 36, 1, (2, 3)),
    ]


def test_buffers_that_cannot_be_described_are_refused() -> None:
    strided = torch.zeros(8, 4, 16, dtype=torch.uint8)[:, 0]
    with pytest.raises(EngineUnsupported, match="do not follow each other"):
        strands_of(entry("X", [[strided]], {0: 0}, True), 0, SHARDED)
    with pytest.raises(EngineUnsupported, match="layers of different shapes"):
        strands_of(entry("X", [[torch.zeros(8, 4), torch.zeros(8, 5)]], {0: 0}, True), 0, SHARDED)


def test_latent_pools_are_the_same_on_every_rank_and_others_are_not() -> None:
    latent = type("MLATokenToKVPool", (), {})
    sparse = type("DSATokenToKVPool", (latent,), {})
    named_otherwise = type("Mine", (sparse,), {})
    assert {placement_of(kind()) for kind in (latent, sparse, named_otherwise)} == {TpPlacement.REPLICATED}
    assert placement_of(type("MambaPool", (), {})()) is SHARDED
