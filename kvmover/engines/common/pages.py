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

#: Pages are packed in groups of about so many bytes, so that they are still in the cache when they are written.
GROUP_BYTES = 8 << 20

#: Whether a rank is the one that writes a page, of all that hold the same part of it.
Election = Callable[[bytes], bool]


def election(component: Component, fleet: Fleet, rank: int) -> Election | None:
    """Who writes a page of which several ranks hold the same part; None where nobody else holds that of `rank`."""
    return partial(elected, component, fleet, rank) if replicas(component, fleet, rank)[1] > 1 else None


def of_all(answers: Sequence[Sequence[bool]]) -> list[bool]:
    """For each page whether all of `answers`, which have one entry a page each, say so."""
    return [all(of_page) for of_page in zip(*answers, strict=True)]


def page_ids(tokens: Numbers, count: int, page_tokens: int) -> Numbers:
    """Numbers of the pages that `tokens` are, `page_tokens` of each. Raises StoreError for anything but whole pages."""
    pages = tokens.reshape(-1, page_tokens) if tokens.size == count * page_tokens else tokens.reshape(-1, 1)
    whole = pages.shape == (count, page_tokens) and (pages == pages[:, :1] + np.arange(page_tokens)).all()
    if not whole or (pages[:, 0] % page_tokens).any():
        raise StoreError(
            f"{tokens.size} indices for {count} pages of {page_tokens} tokens are not whole pages in order"
        )
    return pages[:, 0] // page_tokens


class PoolBackend(Protocol):
    """The pages of one pool. Every answer has one entry a page; a page that failed is False and nothing is raised."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the store, of this rank's part of it."""
        ...

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        """Whether a `get` of each page would find it now."""
        ...

    def put(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        """Store pages of the pool. `tokens`: the pool's indices of all their tokens, page by page."""
        ...

    def get(self, pages: Sequence[bytes], tokens: Numbers) -> list[bool]:
        """Read pages into the pool. What lies at a page that is not True is undefined."""
        ...

    def put_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        """Store a page that the engine took out of the pool itself."""
        ...

    def get_flat(self, page: bytes, flat: torch.Tensor) -> bool:
        """Read a page into `flat`, contiguous on the host, which the engine puts into the pool itself."""
        ...

    def moved(self, store: PageStore, space: Namespace) -> PoolBackend:
        """Returns the backend of the same pool in `space`, which `store` has become: this one moves nothing more."""
        ...


@dataclass(slots=True)
class BounceBuffer:
    """Memory that pages are packed in on their way, one group at a time: pinned where there is a GPU."""

    memory: torch.Tensor
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, page_bytes: int) -> BounceBuffer:
        """Room for at least one page, from an address on that disks take directly."""
        from kvmover.kernels.cuda_driver import pinned

        nbytes = max(1, GROUP_BYTES // page_bytes) * page_bytes
        whole = pinned(nbytes + DIRECT_BYTES)
        return cls(whole[-whole.data_ptr() % DIRECT_BYTES :][:nbytes])

    def between(self, pool: Pool, view: PartView, move: Move) -> PageBounce:
        """The way of `pool`'s pages through this memory. Whoever takes it holds `lock`."""
        pages = self.memory.numel() // view.part.nbytes
        return PageBounce(pool, Pool(pool.spec.packed(pages), (self.memory,)), view, move)


@dataclass(frozen=True, slots=True)
class PackedBackend(PoolBackend):
    """Pages that lie in the pool in an order of its own: copied into the order of objects and back.

    Pages that are stored already, or that another rank writes, are not copied. Two bounces, because the engine reads
    and writes from a thread each. `move` returns when all is copied.
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
        """A page that the engine has taken out of the pool is a pool of one page, dense in the order of the pool."""
        layout = self.pool.spec.layout
        nested = sorted(layout.axes, key=lambda axis: (axis == "page", layout.stride_of(axis)), reverse=True)
        extents = dict(zip(layout.axes, layout.shape, strict=True)) | {"page": 1}
        spec = PoolSpec(self.pool.spec.component, Layout.dense(" ".join(nested), **extents))
        return replace(self, pool=Pool(spec, (as_bytes(flat),)))


@dataclass(frozen=True, slots=True)
class InPlaceBackend(PoolBackend):
    """Pages that are stored from where they lie, a run of the page through each of `views`.

    `addresses`: of the pages that the engine's token indices name, [view][page], in registered memory.
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
        """The runs of a page that stands by itself follow each other."""
        starts = np.cumsum([0, *(view.part.nbytes for view in self.views)]) + scratch.data_ptr()
        memory = memory_of(scratch)
        self.store.register(memory)
        try:
            return move([page], [[start] for start in starts[:-1].tolist()])[0]
        finally:
            self.store.deregister(memory)


class EmptyBackend(PoolBackend):
    """A pool that only numbers the pages of others (DeepSeek V4): it has no bytes, so none can be missing."""

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
    """The memory of a contiguous tensor, flat."""
    import torch

    return tensor.view(-1).view(torch.uint8)
