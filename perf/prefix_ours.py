"""What serves the requests of `bench_prefix`: one interface, and our tree under it with pages, locks and ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from kvmover.cache.ledger import Credit, FaultPolicy, Ledger
from kvmover.cache.prefix import KVEvent, KVEventBatch, PrefixTree, coalesce, forest, keys
from kvmover.tools.replay import ideal, simulated_tiers

#: Called after every operation with its name, and with "start" before the first: the benchmark's clock.
Lap = Callable[[str], object]

#: Stands for no limit: more tokens than the trace has.
UNLIMITED = 160_000_000


class Contender(Protocol):
    """A prefix cache that serves one request after the other."""

    def prepare(self, tokens: np.ndarray) -> Any:
        """The prompt in the form in which this engine holds it; not timed."""
        ...

    def serve(self, prompt: Any, lap: Lap) -> int:
        """Match, lock, evict what is short, insert the prompt, unlock. Tokens that hit."""
        ...


#: `(page_tokens, capacity_tokens) -> Contender`
Maker = Callable[[int, int], Contender]


class Kvmover:
    """The tree with its ledger. As for the peers, pages are counted, not allocated: each request brings new ids.

    They are made before it is timed.
    """

    def __init__(self, page_tokens: int, capacity_tokens: int, sink: Callable[[Any], None] | None = None) -> None:
        self.page_tokens = page_tokens
        self.tree = PrefixTree(page_tokens, sink=sink)
        self.row, self.free_pages = np.empty(0, np.int32), capacity_tokens // page_tokens
        self.pages_named = 0
        self.ledger = Ledger(fault=FaultPolicy.COUNT)
        self.serial = 0

    def prepare(self, tokens: np.ndarray) -> Any:
        first, self.pages_named = self.pages_named, self.pages_named + len(tokens) // self.page_tokens
        self.row = np.arange(first, self.pages_named, dtype=np.int32)
        return tokens

    def serve(self, prompt: np.ndarray, lap: Lap) -> int:
        self.serial += 1
        number, length, tree, ledger = self.serial, len(prompt), self.tree, self.ledger
        lap("start")
        key = tree.key(prompt)
        match = tree.match(key)
        lap("match")
        receipt = tree.lock(match.device_node)
        lap("lock")
        first = match.tokens // self.page_tokens
        needed = length // self.page_tokens - first
        if needed > self.free_pages:
            self.free_pages += len(tree.evict(needed - self.free_pages).page_ids())
        self.free_pages -= needed
        lap("evict")
        inserted = tree.insert(key, self.row[:needed], first_page=first)
        self.free_pages += len(inserted.page_ids())
        lap("insert")
        tree.unlock(receipt)
        lap("unlock")
        ledger.matched(number, length, match.tokens, float(number))
        ledger.admitted(number, Credit(match.tokens))
        ledger.computed(number, length - match.tokens)
        ledger.finished(number, float(number))
        lap("ledger")
        return match.tokens


class KvmoverInt64(Kvmover):
    """The same for an engine that holds tokens in 64 bits, as SGLang does: converted once a request, in `match`."""

    def prepare(self, tokens: np.ndarray) -> Any:
        return super().prepare(tokens).astype(np.int64)


class KvmoverList(Kvmover):
    """The same for an engine that holds tokens as a list of numbers, as vLLM does: converted once a request too."""

    def prepare(self, tokens: np.ndarray) -> Any:
        return super().prepare(tokens).tolist()


class KvmoverPython(Kvmover):
    """The same without the core in C. Every pass is a process of its own, which is changed for good."""

    def __init__(self, page_tokens: int, capacity_tokens: int) -> None:
        without_c()
        super().__init__(page_tokens, capacity_tokens)


def without_c() -> None:
    """Let this process use the Python that defines the core, for good."""
    forest.C_CORE = keys.NATIVE = ideal.NATIVE = simulated_tiers.NATIVE = None


class KvmoverEvents(Kvmover):
    """The same with KV events of every page, so with every token hashed, encoded as one batch after every request."""

    def __init__(self, page_tokens: int, capacity_tokens: int) -> None:
        self.told = list[KVEvent]()
        super().__init__(page_tokens, capacity_tokens, sink=self.told.append)
        self.encoder = msgspec.msgpack.Encoder()

    def serve(self, prompt: np.ndarray, lap: Lap) -> int:
        hit = super().serve(prompt, lap)
        self.encoder.encode(KVEventBatch(0.0, tuple(coalesce(self.told))))
        self.told.clear()
        lap("events")
        return hit
