"""WindowPages and StateSlots are kept beside attention KV: pages of sliding windows, and states of recurrent layers.

A token of SGLang's hybrid allocator has one index, into the pool of full attention. A mapping on the device leads from
it to the token's KV in the window pool, and is 0 once the window was freed alone.

A request writes its state to a slot of its own; slots in the tree are never written. With snapshots, kept in two
further slots by turns, the tree takes the last one's slot, which may lie behind the request's tokens. Without them it
takes the working slot of a request that ends, and a copy before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvmover.cache.prefix import PrefixError
from kvmover.engines.sglang.index_table import IndexTable

if TYPE_CHECKING:
    import torch

    from kvmover.cache.prefix import PageArray

#: The tree's names of sliding windows and of recurrent layers' states.
WINDOW, STATE = "swa", "state"

#: Makes room for one state, if possible.
MakeRoom = Callable[[], object]


class WindowPages:
    """The ids of window pages. Each stands for the full index whose mapping leads to the page."""

    def __init__(self, allocator: Any, indices: IndexTable) -> None:
        self._allocator, self.indices = allocator, indices

    def __len__(self) -> int:
        """Returns the number of kept pages."""
        return len(self.indices)

    def keep(self, full_indices: torch.Tensor, first: int, stop: int) -> PageArray:
        """Returns new ids for the windows of `full_indices[first:stop]`, whole pages."""
        return self.indices.keep(full_indices, first, stop)

    def move(self, ids: PageArray, full_indices: torch.Tensor) -> None:
        """Map the same window pages from other full indices, of equal tokens, from now on."""
        before = self.indices.of(ids)
        pages = self._allocator.translate_loc_from_full_to_swa(before)
        self._allocator.clear_full_to_swa_mapping(before)
        self._allocator.set_full_to_swa_mapping(full_indices, pages)
        self.indices.replace(ids, full_indices)

    def give_back(self, ids: PageArray) -> None:
        """Free these pages, and clear the mappings that lead to them."""
        if len(ids):
            self._allocator.free_swa_segment(self.indices.of(ids), start_pos=0)
            self.indices.forget(ids)

    def forget(self, ids: PageArray) -> None:
        """Forget ids as IndexTable.forget does; the caller clears the allocator."""
        self.indices.forget(ids)


class StateSlots:
    """The ids of state slots, and the slots that requests hold. `rows`: SGLang's `HybridReqToTokenPool`.

    This class is for a pool without snapshots: a request has only the state of all its tokens.
    """

    def __init__(self, rows: Any, indices: IndexTable) -> None:
        self._rows, self.indices = rows, indices

    def __len__(self) -> int:
        """Returns the number of kept slots."""
        return len(self.indices)

    def keep(self, slots: torch.Tensor) -> PageArray:
        """Returns new ids for slots with states."""
        return self.indices.keep(slots)

    def reach(self, req: Any, tokens: int) -> int:
        """Returns the tokens, at most `tokens`, of which the request can give a state; 0 without a state."""
        return tokens

    def take(self, req: Any, make_room: MakeRoom) -> PageArray:
        """Returns the id [1] of the state of `reach` tokens. A finished request keeps no slot.

        Raises PrefixError if a slot is needed and all are in use.
        """
        working = req.kv.mamba_pool_idx.unsqueeze(0)
        if req.finished():
            req.kv.mamba_pool_idx = None
            return self.indices.keep(working.clone())
        copy = self._new(make_room)
        self._rows.mamba_pool.copy_from(working, copy)
        return self.indices.keep(copy)

    def withhold(self, req: Any) -> None:
        """Give the tree no state: a finished request frees all its slots, a running request drops its snapshot."""
        if req.finished():
            self.release(req)
        else:
            self._over(req)

    def release(self, req: Any) -> None:
        """Free all slots of the request."""
        if req.kv.holds_mamba:
            self._rows.free_mamba_cache(req)

    def start(self, req: Any, state: PageArray, make_room: MakeRoom) -> None:
        """Start the request from a state: SGLang copies it to the request's slot before its first step.

        Raises PrefixError if all slots are in use.
        """
        if not req.kv.holds_mamba:
            req.kv.mamba_pool_idx = self._new(make_room)[0]
        req.kv.mamba_cow_src_index = self.indices.of(state)
        req.kv.mamba_needs_clear = False

    def give_back(self, ids: PageArray) -> None:
        """Free these slots."""
        if len(ids):
            self._rows.mamba_allocator.free(self.indices.forget(ids))

    def forget(self, ids: PageArray) -> None:
        """Forget ids as IndexTable.forget does; the caller clears the pool."""
        self.indices.forget(ids)

    def slots(self, ids: PageArray) -> torch.Tensor:
        """Returns the slots of these ids, int64."""
        return self.indices.of(ids)

    def _new(self, make_room: MakeRoom) -> torch.Tensor:
        slot = self._rows.mamba_allocator.alloc(1)
        if slot is None:
            make_room()
            slot = self._rows.mamba_allocator.alloc(1)
        if slot is None:
            raise PrefixError(f"no slot for a state: all {self._rows.mamba_allocator.size} are in use")
        return slot

    def _over(self, req: Any) -> None:
        req.kv.mamba_last_track_seqlen = req.kv.mamba_prev_track_seqlen = None


class SnapshotSlots(StateSlots):
    """The state slots of a pool with snapshots."""

    def reach(self, req: Any, tokens: int) -> int:
        """Returns the tokens of the last snapshot, or of the snapshot before if the request was cut shorter."""
        if not req.finished():
            return req.kv.mamba_last_track_seqlen or 0
        return self._last(req, tokens)[0]

    def take(self, req: Any, make_room: MakeRoom) -> PageArray:
        """Returns the id [1] of the snapshot's slot, for which a running request gets another. Raises PrefixError."""
        if req.finished():
            place = self._last(req, len(req.full_untruncated_fill_ids))[1]
            slot = req.kv.mamba_ping_pong_track_buffer[place].unsqueeze(0).clone()
            self._rows.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=place)
        else:
            slot = self._rows.donate_mamba_ping_pong_slot(req, self._new(make_room))
            self._over(req)
        return self.indices.keep(slot)

    def _last(self, req: Any, tokens: int) -> tuple[int, int]:
        """Returns the tokens of the last snapshot within `tokens` tokens, and its place among the request's."""
        rows, place = self._rows, self._rows.get_mamba_ping_pong_keep_idx(req)
        last, before = req.kv.mamba_last_track_seqlen or 0, req.kv.mamba_prev_track_seqlen or 0
        if last <= tokens:
            return last, place
        if rows.mamba_ping_pong_track_buffer_size == 2 and before <= tokens:
            return before, rows.get_mamba_ping_pong_other_idx(place)
        return 0, place
