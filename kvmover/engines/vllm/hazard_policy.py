"""HazardPolicy evicts from vLLM's host memory as the prefix tree's HAZARD does from the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvmover.cache.prefix import HAZARD, PageOrder
from kvmover.engines.vllm.peer_offloading import LendingPolicy


class HazardPolicy(LendingPolicy):
    """LendingPolicy by another order: chunks of the prompts that are least likely to come again go first.

    vLLM loads it by `"eviction_policy": "HazardPolicy", "cache_policy_module_path": "kvmover.engines.vllm"`. A request
    counts as a use once it has finished. Chunks of requests under way go after all others, the newest first.
    """

    def __init__(self, cache_capacity: int) -> None:
        LendingPolicy.__init__(self, cache_capacity)
        self._order = PageOrder(HAZARD)
        #: Chunks of requests under way.
        self._fresh = dict[bytes, None]()

    def insert(self, key: bytes, chunk: Any, *request: Any) -> None:
        """Add a chunk, of a request under way."""
        LendingPolicy.insert(self, key, chunk, *request)
        self._fresh[key] = None

    def remove(self, key: bytes) -> None:
        """Remove a chunk that could not be stored."""
        LendingPolicy.remove(self, key)
        self._fresh.pop(key, None)
        self._order.discard(key)

    def touch(self, keys: Iterable[bytes], *request: Any) -> None:
        """Count a use of those of the chunks that are here, in the order of their prompt."""
        LendingPolicy.touch(self, keys := list(keys), *request)
        here = [key for key in keys if key in self.chunks]
        for key in here:
            self._fresh.pop(key, None)
        if here:
            self._order.use(here)

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], _inserted: set[bytes], _reused: set[bytes], request: Any
    ) -> None:
        """Count a request as one use of its chunks of all cache groups."""
        keys = [key for group in key_groups for key in group]
        places = {key: request.get_offload_key_position(key) or 0 for key in keys}
        self.touch(sorted(keys, key=places.__getitem__), request)

    def clear(self) -> None:
        """Clear as LendingPolicy does. What was learnt goes too."""
        LendingPolicy.clear(self)
        self._order = PageOrder(HAZARD)
        self._fresh.clear()

    def chosen(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """See LendingPolicy."""

        def keeps(key: bytes) -> bool:
            return key in protected or self.chunks[key].ref_cnt != 0

        keys = self._order.victims(n, keeps)
        keys += [key for key in reversed(self._fresh) if not keeps(key)][: n - len(keys)]
        if len(keys) < n:
            return None
        taken = [(key, self.chunks[key]) for key in keys]
        for key in keys:
            self.remove(key)
        return taken
