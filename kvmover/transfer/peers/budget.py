"""How many bytes this side keeps for each peer: whatever one says, it fills its share of the memory and no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

#: Bytes that are kept for one peer at most: what it asked for before it was offered, what it said about that since, and
#: how its attempts ended. 1,000 early Wants of 2,048 pages each, 8 KiB a page table, are 9.2 MB of it; 64 peers that
#: fill theirs take 1 GiB.
PEER_BYTES = 16 << 20

#: What an entry takes beside its bytes: keys, objects, their places in tables, and a timer.
ENTRY_BYTES = 1024


@dataclass(slots=True)
class Budget:
    """Bytes kept by peer. Who keeps something takes its bytes here first, and gives them back when it is dropped."""

    _kept: Counter[str] = field(default_factory=Counter[str])

    def take(self, peer: str, nbytes: int, leaving: int = 1) -> bool:
        """Whether an entry of `nbytes` bytes may be kept for `peer`; if so, they are its own until given back.

        `leaving`: the entry is kept only if no more than one part in so many of the budget is kept with it.
        """
        if self._kept[peer] + nbytes + ENTRY_BYTES > PEER_BYTES // leaving:
            return False
        self._kept[peer] += nbytes + ENTRY_BYTES
        return True

    def give(self, peer: str, nbytes: int) -> None:
        """An entry of `nbytes` bytes is dropped."""
        self._kept[peer] -= nbytes + ENTRY_BYTES
        if self._kept[peer] <= 0:
            del self._kept[peer]

    def kept_bytes(self, peer: str) -> int:
        """What is kept for a peer now."""
        return self._kept.get(peer, 0)
