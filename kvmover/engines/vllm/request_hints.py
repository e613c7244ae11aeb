"""RequestHints carry out an orchestrator's hints with vLLM's requests: `kv_hints`, or `kvmover_hints` in
`kv_transfer_params`, which OpenAI's endpoints pass on.

vLLM's prefix cache evicts by its own order, so a pin references a request's blocks once more, as another request would.
A hint asking for what the page store does with every block anyway is met.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvmover.cache.hints import (
    HintAction,
    HintAnswer,
    HintMet,
    HintRefusal,
    HintRefused,
    PinHint,
    PinLimits,
    Pins,
    PrefetchHint,
    Prefix,
    RetainHint,
    ShareHint,
)
from kvmover.cache.prefix import FULL
from kvmover.engines.common import HintedRequests
from kvmover.engines.vllm.scheduler import BlockPool, RequestOutcome
from kvmover.engines.vllm.vllm_contract import request_hints


class CachedBlocks(BlockPool, Protocol):
    """The blocks of vLLM, some of which are found by their hash."""

    @property
    def total(self) -> int:
        """Returns the number of blocks that requests may have."""
        ...

    def cached(self, request: str) -> Sequence[Any]:
        """Returns a request's blocks that other requests would find, of every group."""
        ...


@dataclass(frozen=True, slots=True)
class BlockPins:
    """A PinnedPool over vLLM's blocks: a prefix is a list of blocks, and so is the handle."""

    blocks: CachedBlocks

    def lock(self, prefix: Sequence[Any]) -> tuple[Any, ...]:
        """Reference the blocks once more."""
        self.blocks.touch(prefix)
        return tuple(prefix)

    def unlock(self, handle: tuple[Any, ...]) -> None:
        """Drop one reference, the last blocks first: they are evicted in that order."""
        self.blocks.free_blocks(reversed(handle))

    def locked_pages(self, handles: Iterable[tuple[Any, ...]]) -> dict[str, int]:
        """Returns the number of distinct blocks of all groups."""
        return {FULL: len({block.block_id for handle in handles for block in handle})}


class RequestHints:
    """The hints of requests in vLLM's scheduler. `block_tokens` has the tokens of a block in each group. `reads`,
    `writes` return True if there is a store to read or write. `told` counts answers.
    """

    def __init__(
        self,
        blocks: CachedBlocks,
        block_tokens: Sequence[int],
        limits: PinLimits,
        reads: Callable[[], bool],
        writes: Callable[[], bool],
        told: Callable[[Any, str, HintAnswer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks, self._block_tokens, self._reads, self._writes = blocks, tuple(block_tokens), reads, writes
        self._clock = clock
        self.pins = Pins[tuple[Any, ...]](BlockPins(blocks), {FULL: blocks.total}, limits)
        self._requests = HintedRequests[Any](self._carry_out, told)
        #: Blocks that each open request needs, its answer included.
        self._needs: dict[str, int] = {}

    def came(self, request: Any) -> None:
        """Read a new request's hints. Expired pins end, and so do pins that leave it too few blocks."""
        tokens = request.num_prompt_tokens + (request.max_tokens or 0)
        need = self._needs[request.request_id] = sum(-(-tokens // size) + 1 for size in self._block_tokens)
        if len(self.pins):
            self.pins.end(self.pins.over(self._clock()))
            self.pins.give_way(need)
        self._requests.came(request.request_id, request, request_hints(request), request.kv_transfer_params)

    def ended(self, request: Any, outcome: RequestOutcome) -> None:
        """Carry out the remaining hints of a request that is over and still has its blocks."""
        self._needs.pop(request.request_id, None)
        if outcome is RequestOutcome.DELIVERED:
            self._requests.ended(request.request_id, request)
        else:
            self._requests.aborted(request.request_id, request)

    def _carry_out(self, request: Any, action: HintAction) -> HintAnswer:
        hint, name = action.hint, action.name
        if hint.token_ids is not None:
            words = f"{name}: vLLM finds blocks by hashes of requests: no other prefix than its own can be named"
            return HintRefused(HintRefusal.OWN_ALONE, words)
        if isinstance(hint, PinHint):
            return self._pin(request, name, hint.ttl_s)
        if isinstance(hint, RetainHint):
            return HintRefused(HintRefusal.NO_PRIORITIES, f"{name}: vLLM evicts by use, and has no priorities")
        if isinstance(hint, PrefetchHint):
            if self._reads():
                return HintMet(request.num_prompt_tokens)
            return HintRefused(HintRefusal.NO_STORE, f"{name}: there is no page store that is read")
        if isinstance(hint, ShareHint):
            if self._writes():
                return HintMet(self._whole_tokens(request))
            return HintRefused(HintRefusal.NO_STORE, f"{name}: there is no page store that is written to")
        return HintRefused(HintRefusal.NO_HOST, f"{name}: the connector has no host memory to move a prefix to")

    def _pin(self, request: Any, name: str, ttl_s: float) -> HintAnswer:
        if not ttl_s:
            return self.pins.unpin(name)
        blocks = self._blocks.cached(request.request_id)
        prefix = Prefix(blocks, self._whole_tokens(request) if blocks else 0)
        return self.pins.pin(name, prefix, ttl_s, self._clock(), max(self._needs.values(), default=0))

    def _whole_tokens(self, request: Any) -> int:
        """Returns the computed tokens in whole blocks of the first group."""
        return request.num_computed_tokens // self._block_tokens[0] * self._block_tokens[0]
