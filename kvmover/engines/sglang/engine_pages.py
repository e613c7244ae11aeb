"""EnginePages are SGLang's device pages as tiers take and give them: by ids of a table of indices that SGLang deals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import numpy as np

from kvmover.cache.prefix import InvariantBroken, PageArray
from kvmover.cache.tiers import TierError
from kvmover.engines.sglang.device_indices import DeviceIndices


class EnginePages:
    """Of one rank: pages of `page_tokens` tokens in SGLang's `allocator`. See `tiers.DevicePages`."""

    def __init__(self, allocator: Any, indices: DeviceIndices, page_tokens: int) -> None:
        self._allocator, self._indices, self._page_tokens = allocator, indices, page_tokens

    def __len__(self) -> int:
        """Pages that SGLang has free."""
        return self._allocator.available_size() // self._page_tokens

    def take(self, count: int) -> list[int]:
        """See `tiers.DevicePages`."""
        indices = self._allocator.alloc(count * self._page_tokens)
        if indices is None:
            raise TierError(f"{count} pages of SGLang's pool, of which {len(self)} are free")
        return self._indices.keep(indices).tolist()

    def give(self, ids: Iterable[int]) -> None:
        """See `tiers.DevicePages`."""
        row = _row(ids)
        if len(row):
            self._allocator.free_page_ids(self._indices.forget(row))

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """See `tiers.DevicePages`. On a GPU the current stream is waited for: a copy's pages are named on the host."""
        first = self._indices.of(_row(ids))[:: self._page_tokens]
        return cast(list[int], (first // self._page_tokens).tolist())  # pyright: ignore[reportUnknownMemberType]

    def check(self, others: Collection[int]) -> None:
        """See `tiers.DevicePages`: what is free is SGLang's to count."""
        if len(self._indices) != len(others):
            raise InvariantBroken(f"{len(self._indices)} pages have indices, the tree has {len(others)}")


def _row(ids: Iterable[int]) -> PageArray:
    return np.fromiter(ids, np.int32)
