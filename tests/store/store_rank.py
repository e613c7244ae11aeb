"""One rank of a fleet with memory of its own, as the tests of the store drive it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial

from kvmover.layout import Component, Fleet
from kvmover.store import GotResult, Namespace, PagePart, PageStore, PutResult, elected
from kvmover.store.files import memory_of_buffer
from kvmover.tools.conformance import page_hash, part_content

PAGE = 16
SPACE = Namespace("llama", "rev-1", PAGE)
GQA = Component.attention(4, 8, 16, "bfloat16")
MLA = Component.mla(6, 32, "bfloat16")
POISON = 0xA5


def pages_of(count: int, salt: str = "") -> list[bytes]:
    return [page_hash(number, salt) for number in range(count)]


class Rank:
    """Puts what the pages must hold, and looks at every byte of what it gets, neighbours included."""

    def __init__(self, store: PageStore, part: PagePart, slots: int = 16, namespace: Namespace = SPACE, writes=None):
        self.store, self.part, self.tokens = store, part, namespace.page_tokens
        # A gap after every page: what lies there must stay.
        self.stride = -(-(part.nbytes + 64) // 4096) * 4096
        self.buffer = mmap.mmap(-1, slots * self.stride)
        self.memory = memory_of_buffer(self.buffer)
        store.register(self.memory)
        # Registered memory outlives the rank that a test throws away.
        vars(store).setdefault("memory_of_ranks", []).append(self.buffer)
        self.view = store.view(namespace, part, writes)

    @classmethod
    def of(cls, store: PageStore, component: Component, fleet: Fleet, rank: int, slots: int = 16) -> Rank:
        part = PagePart.of(component, fleet.shard(component, rank, 1 << 20), PAGE)
        assert part is not None
        return cls(store, part, slots, writes=partial(elected, component, fleet, rank))

    def addresses(self, count: int) -> list[int]:
        return [self.memory.address + slot * self.stride for slot in range(count)]

    def put(self, pages: Sequence[bytes]) -> list[PutResult]:
        for slot, page in enumerate(pages):
            start = slot * self.stride
            self.buffer[start : start + self.part.nbytes] = self.expected(page)
        return self.view.put(pages, self.addresses(len(pages)))

    def get(self, pages: Sequence[bytes]) -> list[GotResult]:
        """Every page that counts as read is compared; nothing else may be touched."""
        self.buffer[:] = bytes([POISON]) * len(self.buffer)
        results = self.view.get(pages, self.addresses(len(pages)))
        assert len(results) == len(pages)
        for slot, (page, result) in enumerate(zip(pages, results, strict=True)):
            start = slot * self.stride
            if result.ok:
                assert self.buffer[start : start + self.part.nbytes] == self.expected(page), (slot, "other bytes")
            rest = self.buffer[start + self.part.nbytes : start + self.stride]
            assert rest == bytes([POISON]) * len(rest), (slot, "neighbours were written")
        tail = self.buffer[len(pages) * self.stride :]
        assert tail == bytes([POISON]) * len(tail)
        return results

    def expected(self, page: bytes) -> bytes:
        return part_content(page, self.part, self.tokens)

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return self.view.exists(pages)
