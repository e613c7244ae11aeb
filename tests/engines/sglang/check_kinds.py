"""Every kind of cache that SGLang hands over, from its own pool classes, between a prefill and a decode.

What is where is SGLang's word: its scheduler names pages, rows and states (`_send_kv_chunk`), its pools translate token
slots. Every byte outside what belongs to the request is poisoned and must stay so.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import pytest
import torch
from bench import Rank, Shape, finish, pools, start
from check_pd import (
    POISON,
    ROOM,
    ROW,
    STALE,
    KVPoll,
    _answers,
    _failed,
    asked,
    content,
    context,
    polled,
    queues,
    sender_of,
    stages_of,
    states,
    until,
    utils,
)

from kvmover.engines.sglang import sglang_api
from tests.safetensors_files import tiny, write_checkpoint

scheduling: Any = import_module("sglang.srt.disaggregation.prefill").SchedulerDisaggregationPrefillMixin
mem: Any = import_module("sglang.srt.mem_cache.common")
deepseek: Any = import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")
qsa: Any = import_module("sglang.srt.mem_cache.qsa_kv_pool")
windows: Any = import_module("sglang.srt.mem_cache.swa_memory_pool")
allocators: Any = import_module("sglang.srt.mem_cache.allocator.swa")

HEADS, LAYERS, WINDOW = 4, 2, 6


@dataclass(frozen=True)
class Plane:
    """A buffer of one rank. `own` [slot, ...] bytes, `at` the slots that hold the request's, `whole` what they hold.

    `may`: slots that are the request's, be they in use or not: what is written there is nobody else's matter.
    """

    own: torch.Tensor
    at: torch.Tensor
    whole: torch.Tensor
    may: torch.Tensor


class Side:
    """One rank of a prefill or a decode with a pool of SGLang's, one request in it, and the classes of the backend."""

    def __init__(self, rank: Rank, mode: str, family: Family, tokens: int) -> None:
        context.get_parallel().override_permanently(pp_group=stages_of(rank))
        self.rank, self.page, self.tokens = rank, family.page, tokens
        self.column, self.columns = (getattr(context.get_parallel(), f"attn_tp_{word}") for word in ("rank", "size"))
        drawn = torch.randperm(7, generator=torch.Generator().manual_seed(len(mode))) + 1
        self.pages = drawn[: -(-tokens // self.page)]
        self.row = 3 if mode == "prefill" else 5
        self.slots = self.slots_of(self.pages, range(tokens))
        self.swa_pages = drawn.flip(0)[: len(self.pages)]
        self.pool = family.pool(self)
        self.draft = family.draft(self) if family.draft else None
        self.aux = torch.zeros(8, 48, dtype=torch.uint8)
        ours = utils.TransferBackend("kvmover")
        self.classes = {kind.value: utils.get_kv_class(ours, kind) for kind in utils.KVClassType}
        args = self.classes["kvargs"]()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank.tp, rank.pp, 0, 0
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        if self.draft is not None:
            drafts = self.draft.get_contiguous_buf_infos()
            for own, more in zip((args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), drafts, strict=True):
                own += more
            args.num_draft_entries = len(drafts[0])
        args.kv_layer_ids, args.kv_cache_dtype_str = [], family.dtype
        args.kv_layout = utils.get_pd_kv_layout(self.pool)
        args.aux_data_ptrs, args.aux_data_lens = [self.aux.data_ptr()], [self.aux.nbytes]
        args.aux_item_lens, args.page_size = [self.aux[0].nbytes], self.page
        utils.setup_state_kv_args(args, self.pool, self.draft, LAYERS)
        self.types = [kind.value for kind in args.state_types]
        kind, latent = utils.DisaggregationMode(mode), utils.is_mla_backend(self.pool)
        self.manager = self.classes["manager"](args, kind, context.get_context().server_args, latent)

    def slots_of(self, pages: torch.Tensor, positions: range) -> torch.Tensor:
        """Token slots of positions of the request, as SGLang's allocators number them."""
        at = torch.tensor(positions)
        return pages[at // self.page] * self.page + at % self.page

    def every_slot(self) -> torch.Tensor:
        """Of the request's pages, to the end of the last."""
        return self.slots_of(self.pages, range(len(self.pages) * self.page))

    def share(self, heads: int) -> slice:
        first = self.column * heads // self.columns
        return slice(first, first + max(1, heads // self.columns))

    def send_by(self, sender: Any) -> None:
        """SGLang's scheduler sends the request's last chunk: it names pages, rows and states."""
        table = torch.zeros(8, 4096, dtype=torch.int64)
        table[self.row, : self.tokens] = self.slots
        allocator = SimpleNamespace(
            page_size=self.page,
            get_kvcache=lambda: self.pool,
            translate_kv_indices_for_transfer=lambda slots: slots,
            translate_swa_indices_for_transfer=lambda slots: self.pool.translate_loc_from_full_to_swa(slots),
        )
        request = SimpleNamespace(
            start_send_idx=0,
            origin_input_ids=range(self.tokens),
            extend_end=self.tokens,
            kv=SimpleNamespace(req_pool_idx=self.row),
            disagg_decode_prefix_len=0,
            disagg_kv_sender=sender,
            rid="r",
        )
        scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=allocator,
            req_to_token_pool=SimpleNamespace(
                req_to_token=table,
                req_index_to_mamba_index_mapping=torch.arange(8) + 1,
                translate_mamba_indices=lambda of: of,
            ),
            enable_staging=False,
            sliding_window_size=WINDOW,
            disagg_metadata_buffers=SimpleNamespace(set_buf=lambda _: None),
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=self.manager),
            disagg_prefill_pending_chunk_rids=set[str](),
        )
        scheduling._send_kv_chunk(scheduler, request, last_chunk=True)

    def ask_by(self, receiver: Any) -> None:
        """SGLang's queue of a decode tells the receiver where the request has room."""
        queue = SimpleNamespace(
            req_to_metadata_buffer_idx_allocator=SimpleNamespace(alloc=lambda: ROW),
            _transfer_page_indices=lambda _request, slots, page: mem.kv_to_page_indices(slots, page),
            transfer_queue=SimpleNamespace(enable_staging=False),
            _num_published_destinations=0,
        )
        request = queues.DecodeRequest(req=asked(range(self.tokens)), kv_receiver=receiver)
        send = queues.DecodePreallocQueue._send_kv_metadata
        send(queue, request, self.slots, self.page, self.told(), decode_prefix_len=0)

    def told(self) -> list[Any]:
        """State indices that SGLang's scheduler names on this side."""
        heard: list[Any] = []
        sender = SimpleNamespace(
            get_max_transfer_tokens=lambda: None,
            should_send_kv_chunk=lambda *_: True,
            send=lambda pages, of_states, num_kv_tokens: heard.extend(of_states),
        )
        self.send_by(sender)
        return heard


@dataclass(frozen=True)
class Family:
    """A pool of SGLang's, and where in it a request lies."""

    page: int
    pool: Callable[[Side], Any]
    planes: Callable[[Side], Iterator[Plane]]
    draft: Callable[[Side], Any] | None = None
    dtype: str = "bfloat16"


def plane(own: torch.Tensor, at: torch.Tensor, seed: int, may: torch.Tensor, shape: tuple[int, ...] = ()) -> Plane:
    """`shape`: of a slot in the whole model, where a rank holds a part of it: the caller cuts."""
    held = own.view(torch.uint8)
    return Plane(held, at, content(seed, len(at), *(shape or held.shape[1:])), may)


def cut(of: Plane, side: Side, heads: int) -> Plane:
    """What this rank has of slots `head ...`."""
    return Plane(of.own, of.at, of.whole[:, side.share(heads)], of.may)


def attention(side: Side, pool: Any, seed: int, heads: int = HEADS) -> Iterator[Plane]:
    """K and V [slot, head, dim], by token slot."""
    for number, buffer in enumerate([*pool.k_buffer, *pool.v_buffer]):
        shape = heads, buffer.view(torch.uint8).shape[2]
        of = plane(buffer, side.slots, seed + number, side.every_slot(), shape)
        yield cut(of, side, heads)


def by_page(side: Side, buffers: Any, seed: int, at: torch.Tensor | None = None) -> Iterator[Plane]:
    for number, buffer in enumerate(buffers):
        if len(buffer):
            pages = side.pages if at is None else at
            yield plane(buffer.reshape(len(buffer), -1), pages, seed + number, pages)


def mha(side: Side, heads: int = HEADS, dim: int = 16, layers: int = LAYERS) -> Any:
    own = max(1, heads // side.columns)
    return pools.MHATokenToKVPool(8 * side.page, side.page, torch.bfloat16, own, dim, layers, "cpu", False)


def latent(side: Side) -> Any:
    return pools.MLATokenToKVPool(8 * side.page, side.page, torch.bfloat16, 16, 8, LAYERS, "cpu", False)


def of_latent(side: Side) -> Iterator[Plane]:
    for number, buffer in enumerate(side.pool.kv_buffer):
        yield plane(buffer, side.slots, number, side.every_slot())


# Draft models with heads of their own


def drafted(side: Side) -> Iterator[Plane]:
    yield from attention(side, side.pool, 0)
    yield from attention(side, side.draft, 20, 2)


# MXFP8


def mxfp8(side: Side) -> Any:
    own = HEADS // side.columns
    return pools.MHATokenToKVPoolMXFP8(7 * side.page, side.page, torch.float8_e4m3fn, own, 64, LAYERS, "cpu", False)


def with_scales(side: Side) -> Iterator[Plane]:
    yield from attention(side, side.pool, 0)
    for number, buffer in enumerate([*side.pool.k_scale_buffer, *side.pool.v_scale_buffer]):
        held = buffer.view(torch.uint8)
        interleaved = held.ndim == 5
        at = side.pages if interleaved else side.slots
        may = at if interleaved else side.every_slot()
        yield cut(plane(held, at, 40 + number, may, (HEADS, *held.shape[2:])), side, HEADS)


# Windows


def windowed(side: Side, kind: Any = pools.MHATokenToKVPool) -> Any:
    """Layers 0 and 2 attend to everything, 1 and 3 to a window, whose slots SGLang's own allocator maps."""
    size, own = 8 * side.page, HEADS // side.columns
    dtype, dim = (torch.bfloat16, 16) if kind is pools.MHATokenToKVPool else (torch.float8_e4m3fn, 64)
    # What MXFP8 pads, SGLang's selector of pools takes off again.
    of_pool = size - side.page * (kind is not pools.MHATokenToKVPool)
    made = windows.SWAKVPool(of_pool, of_pool, side.page, dtype, own, dim, [1, 3], [0, 2], "cpu", kind)
    allocator = allocators.SWATokenToKVPoolAllocator(size, size, side.page, dtype, "cpu", made, False)
    allocator.set_full_to_swa_mapping(side.every_slot(), side.slots_of(side.swa_pages, range(len(side.every_slot()))))
    return made


def of_mxfp8(side: Side) -> Any:
    return windowed(side, pools.MHATokenToKVPoolMXFP8)


def of_windows(side: Side) -> Iterator[Plane]:
    yield from attention(side, side.pool.full_kv_pool, 0)
    at = side.pool.translate_loc_from_full_to_swa(side.slots[-WINDOW:])
    for number, buffer in enumerate([*side.pool.swa_kv_pool.k_buffer, *side.pool.swa_kv_pool.v_buffer]):
        shape = HEADS, buffer.view(torch.uint8).shape[2]
        yield cut(plane(buffer, at, 20 + number, told_of_window(side), shape), side, HEADS)


def told_of_window(side: Side) -> torch.Tensor:
    """Slots that may be written: those of the window, or of its pages where whole pages move."""
    scales = side.pool.swa_kv_pool.k_scale_buffer
    if scales is None or scales[0].ndim != 5:
        return side.pool.translate_loc_from_full_to_swa(side.slots[-WINDOW:])
    return (pages_of_window(side)[:, None] * side.page + torch.arange(side.page)).flatten()


def pages_of_window(side: Side) -> torch.Tensor:
    return side.swa_pages[max(0, side.tokens - WINDOW) // side.page :]


def with_scales_of_windows(side: Side) -> Iterator[Plane]:
    yield from of_windows(side)
    for pool, seed, is_window in ((side.pool.full_kv_pool, 40, False), (side.pool.swa_kv_pool, 60, True)):
        for number, buffer in enumerate([*pool.k_scale_buffer, *pool.v_scale_buffer]):
            held = buffer.view(torch.uint8)
            if held.ndim == 5:
                at = may = pages_of_window(side) if is_window else side.pages
            else:
                at, may = (told_of_window(side),) * 2 if is_window else (side.slots, side.every_slot())
            yield cut(plane(held, at, seed + number, may, (HEADS, *held.shape[2:])), side, HEADS)


# MiniMax


def minimax(side: Side) -> Any:
    return pools.MiniMaxSparseKVPool(
        8 * side.page,
        side.page,
        torch.bfloat16,
        HEADS // side.columns,
        16,
        32,
        dense_layer_ids=[0],
        sparse_layer_ids=[1],
        disable_value_sparse_layer_ids=[1],
        device="cpu",
        start_layer=0,
        end_layer=2,
    )


def of_minimax(side: Side) -> Iterator[Plane]:
    yield from attention(side, side.pool.main_pool, 0)
    for buffer in side.pool.index_k_pool.k_buffer:
        whole = side.every_slot()
        yield plane(buffer, side.slots, 60, whole)


# Latents with index keys, of which the open group waits in a ring a request


KPOOL, EXTRA = 4, 2


def pooled(side: Side) -> Any:
    """Hybrid: of a plain pool SGLang 0.5.23 does not find a request's row (`get_dsa_tail_state_indices`)."""
    return pools.HybridLinearKVPool(
        8 * side.page,
        torch.bfloat16,
        side.page,
        1,
        24,
        [1, 3],
        "cpu",
        mamba_pool=recurrent(side),
        use_mla=True,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        use_dsa=True,
        index_head_dim=128,
        kv_cache_dim=24,
        index_kpool=KPOOL,
        index_kpool_compress=True,
        tail_extra_slots=EXTRA,
        max_running_requests=7,
        skip_topk_layers=[False, True],
        start_layer=0,
    )


def of_pooled(side: Side) -> Iterator[Plane]:
    pool, width = side.pool.full_kv_pool, KPOOL + EXTRA
    for number, buffer in enumerate(pool.kv_buffer):
        yield plane(buffer, side.slots, number, side.every_slot())
    yield from by_page(side, pool.index_k_with_scale_buffer, 10)
    pending = torch.arange(side.tokens - side.tokens % KPOOL, side.tokens)
    for number, tail in enumerate((pool._compress_tail_k[0], pool._compress_tail_score[0])):
        rows = tail.reshape(-1, tail.shape[2])
        may = torch.cat([torch.arange(width), side.row * width + torch.arange(width)])
        yield plane(rows, side.row * width + pending % width, 30 + number, may)
    yield from of_states(side)


# States

#: Where q, k and v begin in a convolution of the whole model, and how many channels they have.
PROJECTIONS = ((0, 8), (8, 8), (16, 16))

#: x, and B and C of one group, which every rank has: the configuration says so, and the pool does not.
MAMBA2 = ((0, 16), (16, 4), (20, 4))
FALCON = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "mamba_d_ssm": 16,
    "mamba_n_heads": HEADS,
    "mamba_d_head": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 4,
    "mamba_d_conv": 4,
}

#: Of 128 channels, side by side on the ranks.
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["full_attention", "conv"] * 2,
    "conv_L_cache": 3,
}


def recurrent(side: Side) -> Any:
    """A pool of states: a convolution of q, k and v over three steps, and a temporal state of four heads."""
    tp = side.columns
    shape = states.Mamba2StateShape(
        conv=[(32 // tp, 3)],
        temporal=(HEADS // tp, 4, 8),
        intermediate_size=16,
        conv_dim=32,
        ssm_state_size=8,
        num_heads=HEADS,
        head_dim=4,
        state_size=8,
        conv_kernel=4,
        conv_shard_groups=[n for _, n in PROJECTIONS],
    )
    return slots_of_states(shape)


def slots_of_states(shape: Any, kind: Any = states.Mamba2CacheParams) -> Any:
    params = kind(shape=shape, layers=[0, 2])
    return pools.MambaPool(size=15, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu")


def own_channels(side: Side, projections: Any) -> list[slice]:
    """The channels of the whole model that this rank has: of B and C of one group, all."""
    parts: list[slice] = []
    for first, count in projections:
        own = side.share(count) if count > 4 else slice(0, count)
        parts.append(slice(first + own.start, first + own.stop))
    return parts


def of_states(side: Side, projections: Any = PROJECTIONS) -> Iterator[Plane]:
    caches, at = side.pool.mamba_pool.mamba_cache, torch.tensor([side.row + 1])
    total = sum(count for _, count in projections)
    for layer in range(2):
        conv, temporal = (t[layer].view(torch.uint8) for t in (caches.conv[0], caches.temporal))
        of = plane(conv, at, 40 + layer, at, (total, conv.shape[2]))
        channels = torch.cat([torch.arange(part.start, part.stop) for part in own_channels(side, projections)])
        yield Plane(of.own, of.at, of.whole[:, channels], of.may)
        yield cut(plane(temporal, at, 50 + layer, at, (HEADS, *temporal.shape[2:])), side, HEADS)


def mixed(side: Side, kept: Any) -> Any:
    shape = 8 * side.page, torch.bfloat16, side.page, HEADS // side.columns, 16, [1, 3], "cpu"
    return pools.HybridLinearKVPool(*shape, mamba_pool=kept, start_layer=0)


def of_mixed(side: Side, projections: Any = PROJECTIONS) -> Iterator[Plane]:
    yield from attention(side, side.pool.full_kv_pool, 0)
    yield from of_states(side, projections)


def mamba2(side: Side) -> Any:
    """Shapes by SGLang's own reading of a model's configuration."""
    served: Any = sglang_api.model_config()
    return mixed(side, slots_of_states(served.hf_config.mamba2_cache_params.shape))


def of_convolutions(side: Side) -> Iterator[Plane]:
    yield from attention(side, side.pool.full_kv_pool, 0)
    at = torch.tensor([side.row + 1])
    for number, layer in enumerate(side.pool.mamba_pool.mamba_cache.conv[0]):
        conv = layer.view(torch.uint8)
        yield cut(plane(conv, at, 40 + number, at, (128, conv.shape[2])), side, 128)


#: As SGLang has them side by side in a convolution of Kimi's, whose steps are outermost.
KIMI = ((0, 16), (16, 8), (24, 8))


def kimi(side: Side) -> Any:
    made = states.KimiLinearStateShape.create
    shape = made(tp_world_size=side.columns, num_heads=HEADS, head_dim=4, num_k_heads=HEADS, head_k_dim=2)
    return mixed(side, slots_of_states(shape, states.KimiLinearCacheParams))


def of_kimi(side: Side) -> Iterator[Plane]:
    yield from attention(side, side.pool.full_kv_pool, 0)
    caches, at = side.pool.mamba_pool.mamba_cache, torch.tensor([side.row + 1])
    channels = torch.cat([torch.arange(part.start, part.stop) for part in own_channels(side, KIMI)])
    for layer in range(2):
        conv, temporal = (t[layer].view(torch.uint8) for t in (caches.conv[0], caches.temporal))
        whole = content(40 + layer, 1, conv.shape[1], 32, caches.conv[0].element_size())[:, :, channels]
        yield Plane(conv, at, whole.reshape(1, *conv.shape[1:]), at)
        yield cut(plane(temporal, at, 50 + layer, at, (HEADS, *temporal.shape[2:])), side, HEADS)


# Compressed sparse attention of Qwen


def compressed(side: Side) -> Any:
    return qsa.QSATokenToKVPool(
        size=8 * side.page,
        dtype=torch.bfloat16,
        page_size=side.page,
        head_num=HEADS // side.columns,
        head_dim=16,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=recurrent(side),
        qsa_index_kv_heads=2,
        qsa_index_head_dim=8,
        qsa_compress_ratio=4,
        qsa_token_topk=64,
        num_request_slots=8,
        start_layer=0,
    )


def of_compressed(side: Side) -> Iterator[Plane]:
    yield from of_mixed(side)
    ratio, pool = side.pool.qsa_compress_ratio, side.pool
    groups = side.slots[: side.tokens // ratio * ratio : ratio] // ratio
    may = side.slots_of(side.pages, range(0, len(side.pages) * side.page, ratio)) // ratio
    for number, buffer in enumerate(pool.qsa_compressed_k_buffer_pool):
        yield plane(buffer, groups, 70 + number, may)
    positions = torch.arange(side.tokens - side.tokens % ratio, side.tokens)
    at, may = side.row * ratio + positions % ratio, side.row * ratio + torch.arange(ratio)
    for number, buffer in enumerate([*pool.qsa_key_state_buffer_pool, pool.qsa_rope_position_buffer]):
        yield plane(buffer, at, 80 + number, may)


# DeepSeek V4


RATIOS = [0, 4, 128, 4]


def v4(side: Side, ratios: list[int] = RATIOS, **more: Any) -> Any:
    made = deepseek.DeepSeekV4TokenToKVPool(
        max_num_reqs=7,
        swa_size=8 * side.page,
        c4_size=8 * side.page // 4,
        c128_size=8 * side.page // 128,
        c4_state_pool_size=8 * 8,
        c128_state_pool_size=8 * 128,
        page_size=side.page,
        swa_page_size=side.page,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=ratios,
        sliding_window=WINDOW,
        num_req_slots=8,
        **more,
    )
    mapping = torch.zeros(9 * side.page, dtype=torch.int64)
    for page, swa in zip(side.pages, side.swa_pages, strict=True):
        mapping[page * side.page + torch.arange(side.page)] = swa * side.page + torch.arange(side.page)
    made.register_mapping(mapping)
    return made


def of_v4(side: Side) -> Iterator[Plane]:
    pool = side.pool
    for ratio, seed in ((4, 0), (128, 10)):
        yield from by_page(side, pool.kv_pools[ratio].kv_buffer, seed)
    yield from by_page(side, pool.index_pools[4].index_k_with_scale_buffer, 20)
    slots = pool.translate_loc_from_full_to_swa(side.slots[-WINDOW:])
    pages = (slots // side.page).unique()
    for number, buffer in enumerate(pool.swa_kv_pool.kv_buffer):
        yield plane(buffer, pages, 30 + number, side.swa_pages[-2:])
    scoped = [*pool.compress_state_pools, *pool.indexer_compress_state_pools]
    for number, own in enumerate(p for p in scoped if p is not None and not p.request_scoped):
        every = side.swa_pages[-2:, None] * side.page + torch.arange(side.page)
        may = own.translate_from_swa_loc_to_state_loc(every.flatten()).unique()
        at = own.translate_from_swa_loc_to_state_loc(slots).unique()
        yield plane(own.kv_score_buffer.kv_score, at, 50 + number, may)
    yield from pending_compression(side)


def pending_compression(side: Side) -> Iterator[Plane]:
    """Rows every 128 tokens that are not full yet: in a ring of the request's. Nothing pending: in that of nobody."""
    pool = side.pool
    for number, own in enumerate(p for p in pool.compress_state_pools if p is not None and p.request_scoped):
        pending = torch.arange(side.tokens - side.tokens % own.ratio, side.tokens)
        at, may, spare = (
            own.translate_from_req_position_to_state_loc(torch.full_like(positions, row), positions)
            for row, positions in (
                (side.row, pending),
                (side.row, torch.arange(own.ring_size)),
                (0, torch.arange(own.ring_size)),
            )
        )
        yield plane(own.kv_score_buffer.kv_score, at, 70 + number, torch.cat([may, spare]))


def v4_draft(side: Side) -> Any:
    """A draft (DSpark) has windows alone, in the model's pages, and a mark a request where they begin."""
    made = v4(side, [0], is_draft_worker=True)
    made.register_mapping(side.pool.full_to_swa_index_mapping)
    return made


def of_v4_draft(side: Side) -> Iterator[Plane]:
    assert side.draft is not None
    yield from of_v4(side)
    yield from by_page(side, side.draft.swa_kv_pool.kv_buffer, 110, side.swa_pages[-2:])
    row = torch.tensor([side.row])
    yield plane(side.draft.swa_valid_from[:, None], row, 120, row)


def v41(side: Side) -> Any:
    """V4.1: rows every 2 tokens and every one, of layers that others read too, and pairs that wait for their second."""
    return v4(side, [0, 2, 2, 1, 1], kv_source_layers=[1, 3], full_size=8 * side.page)


def v41_replaying(side: Side) -> Any:
    """A prefill that keeps a request's window in a ring of the request's own, and no pages of windows."""
    served, features = deepseek.get_exec(), SimpleNamespace(enable_encoder_swa_bounded_replay=True)
    told = SimpleNamespace(kernel=served.kernel, graph=SimpleNamespace(cuda_graph_config=None), features=features)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepseek, "get_exec", lambda: told)
        return v41(side)


def of_v41(side: Side) -> Iterator[Plane]:
    pool = side.pool
    for ratio, seed in ((2, 0), (1, 10)):
        yield from by_page(side, pool.kv_pools[ratio].kv_buffer, seed)
        index = pool.index_pools[ratio]
        run = side.page // ratio // index.page_size
        at = (side.pages[:, None] * run + torch.arange(run)).flatten()
        yield from by_page(side, index.contiguous_page_row_buffers(), seed + 5, at)
    ring = pool.request_window
    buffers = pool.swa_kv_pool.kv_buffer if ring is None else ring.state.kv_buffer
    pages = side.swa_pages[-2:] if ring is None else torch.tensor([side.row])
    for number, buffer in enumerate(buffers):  # what the ring's one page has goes to each of decode's
        whole = content(30 + number, 1, *buffer.shape[1:]).expand(len(pages), -1)
        yield Plane(buffer, pages, whole, pages)
    for number, own in enumerate(each for each in pool.compress_state_pools if each is not None):
        rows, every = own.kv_score_buffer.kv_score, torch.arange(own.ring_size)
        at = (side.row * own.ring_size + every)[: own.ring_size * (side.tokens % 2)]
        yield plane(rows, at, 70 + number, torch.cat([at, every]))


def of_one_pool(side: Side) -> Iterator[Plane]:
    """As on ROCm: in one buffer a layer, a ring of each request's window, and behind all rings the compressed rows."""
    pool, width = side.pool, side.pool.unified_swa_ring_size
    last = torch.arange(max(0, side.tokens - WINDOW), side.tokens)
    ring, rings = side.row * width + last % width, side.row * width + torch.arange(width)
    for number, buffer in enumerate(pool.unified_kv_pool.kv_buffer):
        of_page = side.page // 128 if pool.compression_ratios[number] else 0
        rows = (side.pages[:, None] * of_page + torch.arange(of_page)).flatten() + pool.unified_swa_pages
        at = torch.cat([ring, rows[: side.tokens // 128]])
        yield plane(buffer, at, 90 + number, torch.cat([rings, rows]))
    yield from pending_compression(side)


# The tests


FAMILIES = {
    "draft": Family(4, mha, drafted, lambda side: mha(side, 2, 32, 1)),
    "mxfp8": Family(4, mxfp8, with_scales, dtype="mxfp8"),
    "mxfp8 interleaved": Family(128, mxfp8, with_scales, dtype="mxfp8"),
    "windows": Family(4, windowed, of_windows),
    "windows on large pages": Family(16, windowed, of_windows),
    "mxfp8 windows": Family(4, of_mxfp8, with_scales_of_windows, dtype="mxfp8"),
    "mxfp8 windows interleaved": Family(128, of_mxfp8, with_scales_of_windows, dtype="mxfp8"),
    "minimax": Family(4, minimax, of_minimax),
    "pooled index keys": Family(256, pooled, of_pooled),
    "qsa": Family(8, compressed, of_compressed),
    "gdn": Family(4, lambda side: mixed(side, recurrent(side)), of_mixed),
    "kda": Family(4, kimi, of_kimi),
    "mamba2": Family(4, mamba2, lambda side: of_mixed(side, MAMBA2)),
    "convolutions": Family(4, mamba2, of_convolutions),
    "mla": Family(4, latent, of_latent),
    "mla on large pages": Family(16, latent, of_latent),
    "gdn on large pages": Family(16, lambda side: mixed(side, recurrent(side)), of_mixed),
    "plain on large pages": Family(16, mha, lambda side: attention(side, side.pool, 0)),
    "plain": Family(4, mha, lambda side: attention(side, side.pool, 0)),
    "deep": Family(4, lambda side: mha(side, layers=3), lambda side: attention(side, side.pool, 0)),
    "deepseek-v4 in one pool": Family(256, lambda side: v4(side, [0, 128, 128]), of_one_pool, dtype="bfloat16"),
    "deepseek-v4": Family(256, v4, of_v4, dtype="fp8_e4m3"),
    "deepseek-v4.1": Family(256, v41, of_v41, dtype="fp8_e4m3"),
    "deepseek-v4.1 replaying": Family(256, v41_replaying, of_v41, dtype="fp8_e4m3"),
    "deepseek-v4 with a draft": Family(256, v4, of_v4_draft, v4_draft, dtype="fp8_e4m3"),
}


def prefill(rank: Rank, port: int, name: str, tokens: int) -> str:
    if rank.number == 0:
        kind = utils.KVClassType.BOOTSTRAP_SERVER
        rank.kept = utils.get_kv_class(utils.TransferBackend("kvmover"), kind)("127.0.0.1", port)
        until(lambda: _answers(port) or None, "the bootstrap server")
    torch.distributed.barrier()
    side = Side(rank, "prefill", FAMILIES[name], tokens)
    planes = list(FAMILIES[name].planes(side))
    for of in planes:
        of.own.fill_(STALE)
    for of in planes:
        of.own[of.at] = of.whole
    side.aux[5] = 7
    sender = sender_of(side, port, asked(range(tokens)))
    if polled(sender.poll, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.Failed:
        return _failed(sender)
    sender.pop_decode_prefix_len()
    sender.init(len(side.pages), 5)
    side.send_by(sender)
    status = polled(sender.poll, KVPoll.Success, KVPoll.Failed)
    torch.distributed.barrier()
    return "" if status == KVPoll.Success else _failed(sender)


def decode(rank: Rank, port: int, name: str, tokens: int) -> str:
    side = Side(rank, "decode", FAMILIES[name], tokens)
    planes = list(FAMILIES[name].planes(side))
    for of in planes:
        of.own.fill_(POISON)
    address = f"127.0.0.1:{port}"
    until(lambda: (_answers(port) and side.manager.try_ensure_parallel_info(address)) or None, "the prefill")
    receiver = side.classes["receiver"](side.manager, address, ROOM)
    receiver.init(0)
    assert polled(receiver.poll, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.WaitingForInput
    side.ask_by(receiver)
    if polled(receiver.poll, KVPoll.Success, KVPoll.Failed) == KVPoll.Failed:
        return _failed(receiver)
    for number, of in enumerate(planes):
        assert torch.equal(of.own[of.at], of.whole), f"buffer {number} of {name}, of kinds {side.types}"
        others = torch.ones(len(of.own), dtype=torch.bool)
        others[of.may] = others[of.at] = False
        assert (of.own[others] == POISON).all(), f"beside buffer {number} of {name}"
    assert (side.aux[ROW] == 7).all()
    return ""


def pair(
    root: Path, src: Shape, dst: Shape, name: str, tokens: int, other: str = "", **more: Any
) -> tuple[list[str], list[str]]:
    """Why each rank of both fleets failed, or "". `other`: the family of the decode, where it is another."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serving = {"disaggregation_transfer_backend": "kvmover", "disaggregation_bootstrap_port": port, **more}
    sides = (
        start(src, root / "p", prefill, port, name, tokens, disaggregation_mode="prefill", port=1, **serving),
        start(dst, root / "d", decode, port, other or name, tokens, disaggregation_mode="decode", port=2, **serving),
    )
    received, sent = (finish(side) for side in reversed(sides))
    return sent, received


def modelled(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """The model's configuration says this as well."""
    monkeypatch.setattr(bench, "MODEL", json.dumps({**json.loads(bench.MODEL), **more}))


@pytest.mark.parametrize(("src", "dst"), [(2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 interleaved", "minimax"])
def test_scales_and_sparse_pools_land_between_fleets_of_one_size(name: str, src: int, dst: int, tmp_path: Path) -> None:
    """SGLang lets no others meet."""
    tokens = 2 * FAMILIES[name].page + 1
    assert pair(tmp_path, Shape(tp=src), Shape(tp=dst), name, tokens) == ([""] * src, [""] * dst)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(("name", "tokens"), [("pooled index keys", 515), ("pooled index keys", 516), ("qsa", 22)])
def test_compressed_keys_land_with_the_group_that_is_still_open(
    name: str, tokens: int, src: int, dst: int, tmp_path: Path
) -> None:
    """The last group of 4 tokens is in a row of the request's own, or there is none."""
    assert pair(tmp_path, Shape(tp=src), Shape(tp=dst), name, tokens) == ([""] * src, [""] * dst)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("tokens", [515, 768, 3], ids=str)
def test_the_six_pools_of_deepseek_v4_land_where_its_classes_look(
    tokens: int, src: int, dst: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, rows every 4 and every 128 tokens, index keys, and what of both is not compressed yet."""
    modelled(monkeypatch, sliding_window=WINDOW)
    answers = pair(tmp_path, Shape(tp=src), Shape(tp=dst), "deepseek-v4", tokens)
    assert answers == ([""] * src, [""] * dst)


@pytest.mark.parametrize(("sent", "tokens"), [("deepseek-v4.1", 515), ("deepseek-v4.1 replaying", 514)], ids=str)
def test_the_rings_of_deepseek_v41_land_in_decodes_pages(
    sent: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an odd number of tokens the last waits for its pair in a ring, a request's; a prefill has windows in one."""
    modelled(monkeypatch, sliding_window=WINDOW)
    assert pair(tmp_path, Shape(tp=2), Shape(), sent, tokens, "deepseek-v4.1") == ([""] * 2, [""])


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1)], ids=str)
def test_the_row_of_a_request_that_says_where_a_drafts_window_begins_lands_in_decodes_row(
    src: int, dst: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which SGLang's pool has where DSpark drafts for DeepSeek V4: as it is told here."""
    monkeypatch.setattr(deepseek, "is_dspark_spec", lambda: True)
    modelled(monkeypatch, sliding_window=WINDOW)
    answers = pair(tmp_path, Shape(tp=src), Shape(tp=dst), "deepseek-v4 with a draft", 515)
    assert answers == ([""] * src, [""] * dst)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1), (4, 2)], ids=str)
def test_projections_of_mamba_2_are_cut_each_by_itself_and_a_group_that_every_rank_has_is_not(
    src: int, dst: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modelled(monkeypatch, **FALCON)
    answers = pair(tmp_path, Shape(tp=src), Shape(tp=dst), "mamba2", 9, disable_radix_cache=True)
    assert answers == ([""] * src, [""] * dst)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (4, 2)], ids=str)
def test_short_convolutions_of_one_projection_are_cut_by_channels(
    src: int, dst: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modelled(monkeypatch, **LFM2)
    answers = pair(tmp_path, Shape(tp=src), Shape(tp=dst), "convolutions", 9, disable_radix_cache=True)
    assert answers == ([""] * src, [""] * dst)


def with_draft(root: Path) -> dict[str, Any]:
    """Options of a server with a draft model that has 2 heads of 32 where the model has 4 of 16."""
    draft = root / "draft"
    write_checkpoint(draft, tiny())
    more = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
    }
    (draft / "config.json").write_text(json.dumps({**json.loads(bench.MODEL), **more}))
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 2,
    }


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (4, 1)], ids=str)
def test_a_draft_with_other_heads_than_the_models_is_cut_by_its_own(src: int, dst: int, tmp_path: Path) -> None:
    answers = pair(tmp_path, Shape(tp=src), Shape(tp=dst), "draft", 9, **with_draft(tmp_path))
    assert answers == ([""] * src, [""] * dst)


@pytest.mark.parametrize(
    ("sent", "received", "theirs", "ours"),
    [
        (
            "plain",
            "draft",
            "(kv bfloat16 2x2x4x32 uint8)",
            "(kv bfloat16 2x2x4x32 uint8, draft bfloat16 1x2x2x64 uint8)",
        ),
        ("deep", "plain", "(kv bfloat16 3x2x4x32 uint8)", "(kv bfloat16 2x2x4x32 uint8)"),
    ],
)
def test_sides_whose_caches_differ_refuse_each_other_and_say_what_each_has(
    sent: str, received: str, theirs: str, ours: str, tmp_path: Path
) -> None:
    prefills, decodes = pair(tmp_path, Shape(), Shape(), sent, 9, received, **with_draft(tmp_path))
    assert prefills == ["decode aborted the request"]
    (reason,) = decodes
    first, second, third = reason.split("; ")
    assert re.fullmatch(rf"peer holds weights \w+ of \S+ {re.escape(ours)}", first), first
    assert re.fullmatch(rf"this side holds weights \w+ of \S+ {re.escape(theirs)}", second), second
    assert third.startswith("they differ in "), third


@pytest.mark.parametrize(("sent", "received"), [("{}", "{} on large pages"), ("{} on large pages", "{}")])
@pytest.mark.parametrize(("name", "src", "dst"), [("plain", 1, 2), ("mla", 2, 1), ("gdn", 2, 1)])
def test_pages_of_other_sizes_are_cut_at_both_sides_borders(
    name: str, src: int, dst: int, sent: str, received: str, tmp_path: Path
) -> None:
    """21 tokens in pages of 4 and of 16: of the last page of 16 the other side has two pages."""
    fleets = Shape(tp=src), Shape(tp=dst)
    assert pair(tmp_path, *fleets, sent.format(name), 21, received.format(name)) == ([""] * src, [""] * dst)


@pytest.mark.parametrize(
    ("sent", "received", "tokens", "src", "dst"),
    [
        ("windows", "windows", 9, 1, 2),
        ("windows", "windows on large pages", 21, 2, 1),
        ("windows on large pages", "windows", 21, 1, 2),
        ("windows on large pages", "windows", 16, 2, 1),
        ("windows", "windows on large pages", 3, 1, 1),
    ],
)
def test_the_last_tokens_of_a_window_land_whatever_the_pages_of_both_sides(
    sent: str, received: str, tokens: int, src: int, dst: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 6 tokens, which end in a page or with it; and of a request that is shorter. Nothing beside them is written."""
    modelled(monkeypatch, sliding_window=WINDOW)
    assert pair(tmp_path, Shape(tp=src), Shape(tp=dst), sent, tokens, received) == ([""] * src, [""] * dst)


@pytest.mark.parametrize("tokens", [9, 12], ids=str)
@pytest.mark.parametrize("name", ["mxfp8 windows", "mxfp8 windows interleaved"])
def test_scales_of_windows_land_with_their_windows(
    name: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By token, and where only SGLang knows what lies where in a page."""
    modelled(monkeypatch, sliding_window=WINDOW)
    page = FAMILIES[name].page
    assert pair(tmp_path, Shape(tp=2), Shape(tp=2), name, page * tokens // 4) == ([""] * 2, [""] * 2)


def test_what_only_sglang_can_read_in_a_page_is_refused_to_pages_of_another_size(tmp_path: Path) -> None:
    prefills, (reason,) = pair(tmp_path, Shape(), Shape(), "mxfp8", 9, "mxfp8 interleaved")
    assert prefills == ["decode aborted the request"]
    assert "scales mxfp8 2x2x4x256 uint8 a row every 128 tokens" in reason


@pytest.mark.parametrize("tokens", [515, 3], ids=str)
def test_a_window_in_a_ring_a_request_lands_in_the_rings_of_rows_that_both_sides_have(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of ROCm, which SGLang makes here if it is told that it may."""
    monkeypatch.setattr(
        import_module("sglang.srt.layers.attention.dsv4.unified_kv_gate"), "is_unified_kv_triton", lambda: True
    )
    modelled(monkeypatch, sliding_window=WINDOW)
    assert pair(tmp_path, Shape(tp=2), Shape(), "deepseek-v4 in one pool", tokens) == ([""] * 2, [""])


@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize(("src", "dst"), [(1, 4), (4, 1)], ids=str)
def test_the_three_projections_of_a_convolution_are_cut_each_by_itself(
    name: str, src: int, dst: int, tmp_path: Path
) -> None:
    """With channels outermost and with steps outermost (sglang#22060, #32262)."""
    assert pair(tmp_path, Shape(tp=src), Shape(tp=dst), name, 9) == ([""] * src, [""] * dst)
