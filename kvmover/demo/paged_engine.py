"""PagedEngine: one fleet of the demo as its scheduler sees it, with its processes, its free pages and its prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvmover.cache.prefix import PrefixTree
from kvmover.demo.processes import Member
from kvmover.errors import KvmoverError
from kvmover.plan.fleet_text import FleetText

#: Pages for this many tokens in every pool: the prompts of a run, kept for later turns.
POOL_TOKENS = 16384


class PagedEngine:
    """Seated processes, free pages, and the prefixes that are kept. All ranks use the same page ids."""

    def __init__(self, name: str, members: Sequence[Member], fleet: FleetText) -> None:
        self.name, self.members, self.fleet = name, members, fleet
        self.page_tokens = fleet.fleet.page_tokens
        self.pages = POOL_TOKENS // self.page_tokens
        self.free = list(range(self.pages))
        random.Random(name).shuffle(self.free)  # neighbours in a request are no neighbours in the pool
        self.tree = PrefixTree(self.page_tokens)

    def take(self, tokens: int) -> list[int]:
        """Pages for `tokens` tokens, from the oldest prefixes where none are free."""
        count = -(-tokens // self.page_tokens)
        if count > len(self.free):
            self.free += self.tree.evict(count - len(self.free)).page_ids().tolist()
        if count > len(self.free):
            raise KvmoverError(f"{self.name}: {tokens} tokens do not fit {self.pages} pages of {self.page_tokens}")
        taken, self.free = self.free[:count], self.free[count:]
        return taken
