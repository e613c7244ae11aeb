"""Requests of SGLang's through a prefix cache, as its scheduler takes them: its own requests, pools and allocation.

What a forward pass would write is written here: in each token's place stands a number of everything before it, so that
a row which names another page is seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bench import MODEL, arguments, context, pools

from tests.safetensors_files import tiny, write_checkpoint

allocation: Any = import_module("sglang.srt.mem_cache.allocation")
base: Any = import_module("sglang.srt.mem_cache.base_prefix_cache")
batches: Any = import_module("sglang.srt.managers.schedule_batch")
common: Any = import_module("sglang.srt.mem_cache.common")
inits: Any = import_module("sglang.srt.mem_cache.cache_init_params")
kinds: Any = import_module("sglang.srt.mem_cache.unified_cache.component_type")
paged: Any = import_module("sglang.srt.mem_cache.allocator.paged")
swa: Any = import_module("sglang.srt.mem_cache.allocator.swa")
swa_pools: Any = import_module("sglang.srt.mem_cache.swa_memory_pool")
tokens_of: Any = import_module("sglang.srt.mem_cache.allocator.token")
radix: Any = import_module("sglang.srt.mem_cache.radix_cache")
sampling: Any = import_module("sglang.srt.sampling.sampling_params")
unified: Any = import_module("sglang.srt.mem_cache.unified_radix_cache")

#: Of a row that holds no request, and of tokens nobody computed.
NOTHING = -1


def publish(folder: Path, **more: Any) -> None:
    """The settings that SGLang's functions ask for, of a server without a GPU: `more` of its arguments."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(MODEL)
    write_checkpoint(folder / "model", tiny())
    args = arguments.ServerArgs(
        model_path=str(folder / "model"),
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        **more,
    )
    context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=0))


def hybrid_allocator(page: int, size: int, window_size: int) -> Any:
    """Two layers, one of which sees a window: its pool has `window_size` tokens."""
    pool = swa_pools.SWAKVPool(size, window_size, page, torch.float32, 1, 4, [0], [1], "cpu", enable_memory_saver=False)
    return swa.SWATokenToKVPoolAllocator(size, window_size, page, torch.float32, "cpu", pool, False)


def parameters(
    page: int, size: int, window: int | None = None, window_size: int = 0, rows: Any = None, **more: Any
) -> Any:
    """`CacheInitParams` over pools of `size` tokens in pages of `page`; `window_size`: of the windows' pool; `rows` of
    requests, where they have states.
    """
    if window is not None:
        allocator = hybrid_allocator(page, size, window_size or size)
    elif page == 1:
        allocator = tokens_of.TokenToKVPoolAllocator(size, torch.float32, "cpu", None, False)
    else:
        allocator = paged.PagedTokenToKVPoolAllocator(size, page, torch.float32, "cpu", None, False)
    named = [kinds.ComponentType.FULL]
    if window is not None:
        named.append(kinds.ComponentType.SWA)
    if rows is not None:
        named.append(kinds.ComponentType.MAMBA)
    plain_rows = pools.ReqToTokenPool(size=16, max_context_len=256, device="cpu", enable_memory_saver=False)
    return inits.CacheInitParams(
        disable=False,
        req_to_token_pool=rows or plain_rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page,
        sliding_window_size=window,
        tree_components=tuple(named),
        **more,
    )


@dataclass
class Server:
    """A cache with its pools, the requests that run, and what their pages hold."""

    cache: Any
    running: list[Any] = field(default_factory=list)
    #: Tokens that requests were admitted with and did not have to compute.
    hits: int = 0
    #: Every request that was made.
    given: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.rows = self.cache.req_to_token_pool
        window = getattr(self.cache, "swa_retain_window", None) or getattr(self.cache, "sliding_window_size", None)
        self.window = window if self.cache.supports_swa() else None
        self.size = self.allocator.size_full
        self.content = torch.full((self.size + self.cache.page_size,), NOTHING)
        if self.window is not None:
            self.window_content = torch.full((self.allocator.size_swa + self.cache.page_size,), NOTHING)

    def request(self, tokens: Sequence[int], **more: Any) -> Any:
        name = f"request-{len(self.given) + 1}"
        self.given.append(batches.Req(name, "", array("q", tokens), sampling.SamplingParams(), **more))
        return self.given[-1]

    def match(self, req: Any) -> int:
        """Tokens of the request that the cache has, all but its last token asked for."""
        req.init_next_round_input(self.cache)
        return req.prefix_len

    def room(self) -> int:
        """Tokens that can be allocated, if need be after an eviction."""
        if self.window is None:
            return self.allocator.available_size() + self.cache.evictable_size()
        full = self.allocator.full_available_size() + self.cache.full_evictable_size()
        return min(full, self.allocator.swa_available_size() + self.cache.swa_evictable_size())

    def prefill(self, req: Any, chunk: int = 1 << 20) -> bool:
        """The first or next chunk of a request. False, and nothing is changed, where there is no room for it."""
        first = req not in self.running
        if first:
            self.match(req)
        whole = len(req.full_untruncated_fill_ids)
        end = min(whole, req.prefix_len + chunk)
        page = self.cache.page_size
        lock = self.cache.lock(req.last_node) if first else None
        if self.room() < (end - req.prefix_len) + 2 * page:
            self.cache.unlock(lock)
            return False
        req.extend_end = end
        if first:
            req.lock, before = lock, req.prefix_len
            self.hits += before
            self.running.append(req)
        self.extend(req)
        self.checkpoint(req)
        return True

    def extend(self, req: Any) -> None:
        """Allocate and compute a chunk, up to `req.extend_end`."""
        allocation.alloc_for_extend(self._batch(req))
        self._compute(req, req.prefix_len, req.extend_end)

    def checkpoint(self, req: Any) -> None:
        """A chunk was computed; with the last one there is a token of the answer."""
        if req.extend_end == len(req.full_untruncated_fill_ids):
            req.output_ids.append(1000 + len(req.output_ids))
        common.checkpoint_kv_cache(req, self.cache)

    def decode(self, req: Any) -> bool:
        """One more token. False where there is no room for it."""
        if self.room() < 2 * self.cache.page_size:
            return False
        at = req.kv.kv_committed_len
        allocation.alloc_for_decode(self._batch(req), 1)
        req.decode_batch_idx += 1
        self._compute(req, at, at + 1)
        req.output_ids.append(1000 + len(req.output_ids))
        return True

    def finish(self, req: Any) -> None:
        req.finished_reason = batches.FINISH_LENGTH(length=len(req.output_ids))
        req.finished_len = len(req.output_ids)
        self._release(req, checkpoint=True)

    def abort(self, req: Any) -> None:
        """As the scheduler gives up a request that a client left, or one that it could not go on with."""
        req.finished_reason = batches.FINISH_ABORT("gone")
        self._release(req, checkpoint=False)

    def retract(self, req: Any) -> None:
        self.running.remove(req)
        batches.release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            hisparse_coordinator=None,
        )

    def check(self) -> None:
        """No page is lost, none has two owners, and every row names pages that hold what the request says."""
        page, cache = self.cache.page_size, self.cache
        owned = owned_windows = 0
        for req in self.running:
            held, kept = -(-req.kv.kv_allocated_len // page) * page, req.kv.cache_protected_len
            done = req.kv.kv_committed_len
            owned += held - kept
            owned_windows += held - max(kept, req.kv.get_evicted_seqlen(kinds.ComponentType.SWA))
            row = self.rows.req_to_token[req.kv.req_pool_idx, :done].long()
            wanted = torch.tensor(numbers_of(req, 0, done))
            assert torch.equal(self.content[row], wanted), f"{req.rid} reads another request's pages"
            if self.window is not None:
                # The window of a token has the token itself in it.
                last = max(0, done + 1 - self.window)
                seen = self.window_content[self.allocator.full_to_swa_index_mapping[row[last:]]]
                assert torch.equal(seen, wanted[last:]), f"{req.rid} reads another window"
        if self.window is None:
            free, kept = self.allocator.available_size(), cache.evictable_size() + cache.protected_size()
        else:
            free, kept = self.allocator.full_available_size(), cache.full_evictable_size() + cache.full_protected_size()
            free_windows = self.allocator.swa_available_size()
            kept_windows = cache.swa_evictable_size() + cache.swa_protected_size()
            assert free_windows + kept_windows + owned_windows == self.allocator.size_swa
        assert free + kept + owned == self.size, (free, kept, owned, self.size)
        if hasattr(self.cache, "check"):
            self.cache.check()
        else:
            self.cache.sanity_check()

    def _release(self, req: Any, checkpoint: bool) -> None:
        self.running.remove(req)
        common.release_kv_cache(req, self.cache, checkpoint=checkpoint)

    def _compute(self, req: Any, first: int, stop: int) -> None:
        row = self.rows.req_to_token[req.kv.req_pool_idx, first:stop].long()
        numbers = torch.tensor(numbers_of(req, first, stop))
        self.content[row] = numbers
        if self.window is not None:
            self.window_content[self.allocator.full_to_swa_index_mapping[row]] = numbers

    def _slide(self, req: Any) -> None:
        """What a decode step gives up of windows first, as SGLang's batch does it."""
        if self.window is None or not req.decode_batch_idx:
            return
        self.allocator.free_group_begin()
        self.cache.evict_sliding_windows(req, req.seqlen - 1)
        if req.decode_batch_idx >= self.window:
            self.cache.release_swa_prefix_lock(req)
        self.allocator.free_group_end()

    def _batch(self, req: Any) -> Any:
        """What allocation reads of SGLang's batch, of one request."""
        done = req.kv.kv_committed_len
        seq = torch.tensor([req.extend_end if req.kv.kv_allocated_len <= req.prefix_len else done])
        return SimpleNamespace(
            reqs=[req],
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            hisparse_coordinator=None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            maybe_evict_swa=lambda: self._slide(req),
            is_dllm=lambda: False,
            prefix_lens=[req.prefix_len],
            extend_lens=[(req.extend_end or 0) - req.prefix_len],
            extend_num_tokens=(req.extend_end or 0) - req.prefix_len,
            seq_lens=seq,
            seq_lens_cpu=seq,
            req_pool_indices=torch.tensor([req.kv.req_pool_idx or 0]),
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx or 0]),
        )


def numbers_of(req: Any, first: int, stop: int) -> list[int]:
    """Of each position, a number of its namespace and of all tokens up to it."""
    tokens = [*req.origin_input_ids, *req.output_ids]
    number = hash((req.extra_key, req.cache_salt))
    numbers = []
    for place in range(stop):
        number = hash((number, tokens[place]))
        if place >= first:
            numbers.append(number)
    return numbers
