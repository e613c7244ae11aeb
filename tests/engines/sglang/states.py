"""Requests of a model with recurrent layers through a prefix cache: SGLang's pool of states, its slots and snapshots.

A state is a number of all tokens up to it, and stands in SGLang's own pool on the CPU, so that its own copies move it.
What a forward pass would write is written here; what SGLang's batch plans for one is planned by SGLang's own functions.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from scheduling import Server, batches, common, context, numbers_of, pools

shapes: Any = import_module("sglang.srt.configs.mamba_utils")
processing: Any = import_module("sglang.srt.managers.scheduler_components.batch_result_processor")

#: Tokens of a chunk of the recurrence: states exist at its multiples.
CHUNK = 8
#: Arguments of a server that takes a snapshot every so many tokens of an answer.
SNAPSHOTS = {"mamba_track_interval": 16}
#: Numbers that float32 holds exactly.
_EXACT = 1 << 24


def state_rows(slots: int, snapshots: str) -> Any:
    """Rows of 16 requests with `slots` slots of states. `snapshots`: "none", "kept", or "lazy" where one slot is
    enough."""
    shape = shapes.Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=1, head_dim=8, state_size=4, conv_kernel=4
    )
    dtype = shapes.Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    return pools.HybridReqToTokenPool(
        size=16,
        mamba_size=slots,
        mamba_spec_state_size=16,
        max_context_len=256,
        device="cpu",
        enable_memory_saver=False,
        cache_params=shapes.Mamba2CacheParams(shape=shape, layers=[0, 1], dtype=dtype),
        mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=snapshots != "none",
        enable_mamba_extra_buffer_lazy=snapshots == "lazy",
    )


class StateServer(Server):
    """A server of a model with states."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states = self.rows.mamba_pool.mamba_cache.temporal
        self.snapshots = self.rows.enable_mamba_extra_buffer
        #: Snapshots that prompts took at a branch, for the next prompt to begin at.
        self.branched = 0

    def room(self) -> int:
        """As without states; none where a request would find no slots."""
        slots = self.rows.mamba_allocator.available_size() + self.cache.mamba_evictable_size()
        return super().room() if slots >= 2 + self.rows.mamba_initial_tracking_slots else 0

    def prefill(self, req: Any, chunk: int = 1 << 20) -> bool:
        took = super().prefill(req, chunk)
        if not took and req not in self.running:
            self.leave(req)
        return took

    def leave(self, req: Any) -> None:
        """A request that waits is given up: its match has a slot already."""
        common.release_kv_cache(req, self.cache, checkpoint=False)

    def extend(self, req: Any) -> None:
        first = req.prefix_len
        super().extend(req)
        plan = SimpleNamespace(mamba_cow_src_indices=None, mamba_cow_dst_indices=None, mamba_clear_indices=None)
        batches.ScheduleBatch._collect_deferred_mamba_cow_and_clear(plan, [req])
        if plan.mamba_cow_src_indices is not None:
            self.rows.copy_mamba_state(plan.mamba_cow_src_indices, plan.mamba_cow_dst_indices)
        if plan.mamba_clear_indices is not None:
            self.rows.mamba_pool.clear_slots(plan.mamba_clear_indices)
        assert self._state(req) == number(req, first), f"{req.rid} goes on from another state"
        if self.snapshots:
            branch = req.mamba_branching_seqlen
            batch = SimpleNamespace(
                model_config=SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=CHUNK)),
                tree_cache=self.cache,
                req_to_token_pool=self.rows,
            )
            entry = batches.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)
            if entry.track_mask:
                self._write(req.kv.mamba_ping_pong_track_buffer[entry.track_position], req, self._snapshot(req))
                self.branched += self._snapshot(req) == branch
        self._write(req.kv.mamba_pool_idx, req, req.extend_end)

    def decode(self, req: Any) -> bool:
        if not super().decode(req):
            return False
        done = req.kv.kv_committed_len
        self._write(req.kv.mamba_pool_idx, req, done)
        if self.snapshots and done % context.mamba_track_grid(self.cache.page_size) == 0:
            place = req.kv.mamba_next_track_idx
            self._write(req.kv.mamba_ping_pong_track_buffer[place], req, done)
            # As SGLang's scheduler notes the result of a step without overlap.
            req.kv.mamba_last_track_idx = place
            req.kv.mamba_prev_track_seqlen, req.kv.mamba_last_track_seqlen = req.kv.mamba_last_track_seqlen, done
            req.kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(place)
        return True

    def check(self) -> None:
        """No slot is lost, none has two owners, and each holds what is said of it."""
        super().check()
        owned = []
        for req in self.given:
            if req.finished():  # SGLang's own cache leaves it the number of the slot that it took over
                continue
            if req.kv.holds_mamba:
                owned.append(int(req.kv.mamba_pool_idx))
            if req.kv.mamba_ping_pong_track_buffer is not None:
                owned += [slot for slot in req.kv.mamba_ping_pong_track_buffer.tolist() if slot >= 0]
        kept = self.cache.all_mamba_values_flatten().tolist()
        free = self.rows.mamba_allocator.free_slots.tolist()
        assert sorted([*owned, *kept, *free]) == list(range(1, self.rows.mamba_allocator.size + 1))
        assert len(kept) == self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        for req in self.running:
            assert self._state(req) == number(req, req.kv.kv_committed_len), f"{req.rid} has another state"

    def _snapshot(self, req: Any) -> int:
        return req.kv.mamba_last_track_seqlen

    def _state(self, req: Any) -> int:
        return int(self.states[0, int(req.kv.mamba_pool_idx)].flatten()[0])

    def _write(self, slot: torch.Tensor, req: Any, tokens: int) -> None:
        self.states[:, int(slot)] = number(req, tokens)


def number(req: Any, tokens: int) -> int:
    """The state after the first `tokens` tokens of a request; of none it is 0."""
    return numbers_of(req, tokens - 1, tokens)[0] % _EXACT if tokens else 0
