"""A PoolBackend moves pages between an engine's pool and the page store, in place or through a packed copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvmover.bounce import PageBounce
from kvmover.errors import StoreError
from kvmover.layout import Component, Fleet, Layout, Pool, PoolSpec
from kvmover.regions import Move
from kvmover.store import DIRECT_BYTES, Namespace, PageStore, PartView, elected, replicas
from kvmover.transport import memory_of

if TYPE_CHECKING:
    import torch

Numbers = npt.NDArray[np.int64]

#: Bytes packed at a time: small enough to be in the CPU's cache when they are written.
GROUP_BYTES = 8 << 20

#: A function that returns True if this rank writes a page, among all ranks with the same part of it.
Election = Callable[[bytes], bool]


def election(component: Component, fleet: Fleet, rank: int) -> Election | None:
    """Returns the election of the writing rank, or None if no other rank holds the same part as `rank`."""
    return partial(elected, component, fleet, rank) if replicas(component, fleet, rank)[1] > 1 else None


def of_all(answers: Sequence[Sequence[bool]]) -> list[bool]:
    """Returns, page by page, True if all `answers` are True. Each answer has one entry a page."""
    return [all(of_page) for of_page in zip(*answers, strict=True)]


def page_ids(tokens: Numbers, count: int, page_tokens: int) -> Numbers:
    """Returns page numbers from token indices, `page_tokens` a page. Raises StoreError unless they are whole pages in
    order.
    """
    pages = tokens.reshape(-1, page_tokens) if tokens.size == count * page_tokens else tokens.reshape(-1, 1)
    whole = pages.shape == (count, page_tokens) and (pages == pages[:, :1] + np.arange(page_tokens)).all()
    if not whole or (pages[:, 0] % page_tokens).any():
        raise StoreError(
            f"{tokens.size} indices for {count} pages of {page_tokens} tokens are not whole pages in order"
        )
    return pages[:, 0] // page_tokens


class PoolBackend(Protocol):
    """The pages of one pool. Every answer has one entry a page; a failed page is False, without an exception."""

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of this rank's part of a page in the store."""
        ...

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        """Returns True for each page that a `get` would find now."""
        ...

    def put(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        """Store pages of the pool. `tokens` has the pool's indices of all their tokens, page by page."""
        ...

    def get(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        """Read pages into the pool. The memory of a failed page is undefined afterwards."""
        ...

    def put_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        """Store a page that the engine copied out of the pool."""
        ...

    def get_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        """Read a page into `flat`, contiguous on the host, which the engine copies into the pool."""
        ...

    def moved(self, store: PageStore, space: Namespace) -> PoolBackend:
        """Returns the backend of the same pool in `space`, the new namespace of `store`. This backend is not used
        again.
        """
        ...


@dataclass(slots=True)
class BounceBuffer:
    """A buffer in which pages are packed on their way, one group at a time; pinned if there is a GPU."""

    memory: torch.Tensor
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, page_bytes: int) -> BounceBuffer:
        """Returns a buffer of at least one page, aligned for direct disk access."""
        from kvmover.kernels.pinned import pinned

        nbytes = max(1, GROUP_BYTES // page_bytes) * page_bytes
        whole = pinned(nbytes + DIRECT_BYTES)
        return cls(whole[-whole.data_ptr() % DIRECT_BYTES :][:nbytes])

    def between(self, pool: Pool, view: PartView, move: Move) -> PageBounce:
        """Returns the path of `pool`'s pages through this buffer. The caller holds `lock`."""
        pages = self.memory.numel() // view.part.nbytes
        return PageBounce(pool, Pool(pool.spec.packed(pages), (self.memory,)), view, move)


@dataclass(frozen=True, slots=True)
class PackedBackend(PoolBackend):
    """A backend of a pool whose order differs from the objects' order: pages are copied there and back.

    Pages that are stored already, or that another rank writes, are not copied. There are two buffers, because the
    engine reads and writes in one thread each. `move` returns when all bytes are copied.
    """

    pool: Pool
    view: PartView
    page_tokens: int
    out: BounceBuffer
    into: BounceBuffer
    move: Move
    writes: Election | None = None

    @property
    def page_bytes(self) -> int:
        return self.view.part.nbytes

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return self.view.exists(pages)

    def put(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        ids = page_ids(tokens, len(pages), self.page_tokens)
        done = self.view.exists(pages)
        if self.writes:
            done = [found or not self.writes(page) for found, page in zip(done, pages, strict=True)]
        todo = [number for number, is_done in enumerate(done) if not is_done]
        with self.out.lock:
            bounce = self.out.between(self.pool, self.view, self.move)
            results = bounce.put([pages[number] for number in todo], ids[todo].tolist())
        for number, result in zip(todo, results, strict=True):
            done[number] = result.ok
        return done

    def get(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        ids = page_ids(tokens, len(pages), self.page_tokens)
        with self.into.lock:
            results = self.into.between(self.pool, self.view, self.move).get(pages, ids.tolist())
        return [result.ok for result in results]

    def put_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        return self._alone(flat).put([page], np.arange(self.page_tokens))[0]

    def get_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        return self._alone(flat).get([page], np.arange(self.page_tokens))[0]

    def moved(self, store: PageStore, space: Namespace) -> PackedBackend:
        return replace(self, view=_again(store, space, self.view))

    def _alone(self, flat: torch.Tensor) -> PackedBackend:
        """Returns a backend of one page outside the pool, dense in the pool's order."""
        layout = self.pool.spec.layout
        nested = sorted(layout.axes, key=lambda axis: (axis == "page", layout.stride_of(axis)), reverse=True)
        extents = dict(zip(layout.axes, layout.shape, strict=True)) | {"page": 1}
        spec = PoolSpec(self.pool.spec.component, Layout.dense(" ".join(nested), **extents))
        return replace(self, pool=Pool(spec, (as_bytes(flat),)))


@dataclass(frozen=True, slots=True)
class InPlaceBackend(PoolBackend):
    """A backend that stores pages from their place in the pool, one run of a page through each of `views`.

    `addresses` returns, from token indices and a page count, the addresses [view][page] of the runs, in registered
    memory.
    """

    store: PageStore
    views: tuple[PartView, ...]
    addresses: Callable[[Numbers, int], list[list[int]]]

    @property
    def page_bytes(self) -> int:
        return sum(view.part.nbytes for view in self.views)

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return of_all([view.exists(pages) for view in self.views])

    def put(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        return self._put(pages, self.addresses(tokens, len(pages)))

    def get(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        return self._get(pages, self.addresses(tokens, len(pages)))

    def put_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        scratch = as_bytes(flat).clone()
        return self._flat(scratch, self._put, page)

    def get_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        scratch = as_bytes(flat).clone()
        ok = self._flat(scratch, self._get, page)
        if ok:
            as_bytes(flat).copy_(scratch)
        return ok

    def moved(self, store: PageStore, space: Namespace) -> InPlaceBackend:
        return replace(self, views=tuple(_again(store, space, view) for view in self.views))

    def _put(self, pages: Sequence[bytes], addresses: list[list[int]]) -> list[bool]:
        return of_all([[r.ok for r in view.put(pages, at)] for view, at in zip(self.views, addresses, strict=True)])

    def _get(self, pages: Sequence[bytes], addresses: list[list[int]]) -> list[bool]:
        return of_all([[r.ok for r in view.get(pages, at)] for view, at in zip(self.views, addresses, strict=True)])

    def _flat(
        self, scratch: torch.Tensor, move: Callable[[Sequence[bytes], list[list[int]]], list[bool]], page: bytes
    ) -> bool:
        """Move a page outside the pool, whose runs follow each other."""
        starts = np.cumsum([0, *(view.part.nbytes for view in self.views)]) + scratch.data_ptr()
        memory = memory_of(scratch)
        self.store.register(memory)
        try:
            return move([page], [[start] for start in starts[:-1].tolist()])[0]
        finally:
            self.store.deregister(memory)


class EmptyBackend(PoolBackend):
    """A backend of a pool without bytes, which only numbers the pages of other pools (DeepSeek V4)."""

    @property
    def page_bytes(self) -> int:
        return 0

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return [True] * len(pages)

    def put(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        return [True] * len(pages)

    get = put

    def put_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        return True

    get_flat = put_flat

    def moved(self, store: PageStore, space: Namespace) -> EmptyBackend:
        return self


def _again(store: PageStore, space: Namespace, view: PartView) -> PartView:
    return store.view(space, view.part, view.writes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor, uint8 [byte]."""
    import torch

    return tensor.view(-1).view(torch.uint8)
