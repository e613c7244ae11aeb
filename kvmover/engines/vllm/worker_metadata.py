"""What workers tell the scheduler: who they are, which blocks they have stored, and how their transfers ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmover.engines.vllm import engine
from kvmover.engines.vllm.tally import RankEnding
from kvmover.store import PagePart

#: Blocks that are being stored and not told of yet: the oldest are forgotten beyond so many.
_MOST_AWAITED = 1 << 16


@dataclass
class KvmoverHandshakeMetadata(engine.HandshakeMetadata):
    """A rank: its card for other engines, and what it holds of a stored block."""

    card: bytes
    parts: tuple[PagePart, ...]


@dataclass
class KvmoverWorkerMetadata(engine.WorkerMetadata):
    """Of a step. `stored`: how many ranks are done with storing a block, by its hash. `ended`: transfers, by rank."""

    stored: dict[bytes, int]
    ended: list[RankEnding]

    def aggregate(self, other: KvmoverWorkerMetadata) -> KvmoverWorkerMetadata:
        """What two ranks told, as one."""
        return KvmoverWorkerMetadata(dict(Counter(self.stored) + Counter(other.stored)), self.ended + other.ended)


@dataclass(slots=True)
class StoredBlockEvents:
    """Events of blocks that are being stored, told when all `ranks` are done with them."""

    ranks: int
    _awaited: dict[bytes, Any] = field(default_factory=dict[bytes, Any])
    _done: Counter[bytes] = field(default_factory=Counter[bytes])
    _ready: list[Any] = field(default_factory=list[Any])

    def expect(self, block_hash: bytes, event: Any) -> None:
        """`event` is to be told once every rank has stored the block."""
        self._awaited[block_hash] = event
        if len(self._awaited) > _MOST_AWAITED:
            oldest = next(iter(self._awaited))
            del self._awaited[oldest], self._done[oldest]

    def heard(self, ranks: Mapping[bytes, int]) -> None:
        """So many more ranks are done with each block."""
        for block_hash, count in ranks.items():
            if block_hash not in self._awaited:
                continue
            self._done[block_hash] += count
            if self._done[block_hash] >= self.ranks:
                self._ready.append(self._awaited.pop(block_hash))
                del self._done[block_hash]

    def take(self) -> list[Any]:
        """Events whose blocks are whole in the store since the last call."""
        taken, self._ready = self._ready, []
        return taken
