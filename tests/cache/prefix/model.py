"""What a prefix tree must answer, from a model that stores whole prefixes and knows neither nodes nor splits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvmover.cache.prefix import FULL, PrefixTree, SlidingWindow, State, Tier, WriteBack
from kvmover.cache.prefix.hashes import as_int64, chain
from kvmover.cache.prefix.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium

Prefix = tuple[int, ...]
MEDIA = {Medium.GPU: Tier.DEVICE, Medium.CPU_PINNED: Tier.HOST}


@dataclass
class Copy:
    """A copy under way: for each component, the prefixes whose last page (or state) moves, and the ids it moves to."""

    op: int
    dst: Tier
    pages: dict[str, list[tuple[Prefix, int]]]
    first: int
    path: Prefix
    landed: int | None = None


@dataclass
class Lock:
    prefix: Prefix
    tier: Tier
    #: Ids of further components that must stay, by component.
    held: dict[str, set[int]] = field(default_factory=dict)


class Model:
    """`at[component, tier]` maps a prefix, up to a page's end, to the id of that page, or of the state there."""

    def __init__(self, tree: PrefixTree) -> None:
        self.page = tree.config.page_tokens
        self.components = {component.name: component for component in tree.config.components}
        self.back = isinstance(tree.config.tiers, WriteBack)
        self.at: dict[tuple[str, Tier], dict[Prefix, int]] = {
            (name, tier): {} for name in (FULL, *self.components) for tier in (Tier.DEVICE, Tier.HOST)
        }
        self.locks: dict[int, Lock] = {}
        self.copies: dict[int, Copy] = {}
        self.told: dict[Tier, set[int]] = {Tier.DEVICE: set(), Tier.HOST: set()}

    def prefixes(self, tokens: Sequence[int]) -> list[Prefix]:
        return [tuple(tokens[:end]) for end in range(self.page, len(tokens) + 1, self.page)]

    def words(self, prefix: Prefix) -> tuple[list[int], int]:
        """What a page's hash is of, and how many words a page has: a unit of two tokens is two."""
        if prefix and isinstance(prefix[0], tuple):
            return [token for unit in prefix for token in cast("tuple[int, ...]", unit)], 2 * self.page
        return list(prefix), self.page

    def hear(self, event: KVEvent) -> None:
        """Stored before removed, and never twice."""
        if isinstance(event, BlockStored):
            told = self.told[MEDIA[event.medium or Medium.GPU]]
            assert not told & set(event.block_hashes)
            told |= set(event.block_hashes)
            assert event.parent_block_hash is None or event.parent_block_hash in self.told[Tier.DEVICE] | told
            assert len(event.token_ids) == len(event.block_hashes) * self.page
        elif isinstance(event, BlockRemoved):
            told = self.told[MEDIA[event.medium or Medium.GPU]]
            assert set(event.block_hashes) <= told
            told -= set(event.block_hashes)
        else:
            assert isinstance(event, AllBlocksCleared)

    def hear_all(self, resident: Iterable[KVEvent]) -> None:
        """All that is there, told anew to somebody who knows nothing: it comes to the same."""
        told, self.told = self.told, {tier: set[int]() for tier in self.told}
        for event in resident:
            self.hear(event)
        assert self.told == told

    def usable(self, tokens: Sequence[int], tiers: Sequence[Tier]) -> int:
        """Pages of the longest prefix at whose end all components are of use."""
        best = 0
        for count, prefix in enumerate(self.prefixes(tokens), 1):
            if not self.has(FULL, prefix, tiers):
                break
            if all(self.of_use(name, tokens, count, tiers) for name in self.components):
                best = count
        return best

    def has(self, name: str, prefix: Prefix, tiers: Sequence[Tier]) -> bool:
        return any(prefix in self.at[name, tier] for tier in tiers)

    def of_use(self, name: str, tokens: Sequence[int], count: int, tiers: Sequence[Tier]) -> bool:
        component = self.components[name]
        if isinstance(component, State):
            return self.has(name, tuple(tokens[: count * self.page]), tiers)
        assert isinstance(component, SlidingWindow)
        pages = min(count, -(-component.window_tokens // self.page))
        return all(self.has(name, tuple(tokens[: i * self.page]), tiers) for i in range(count - pages + 1, count + 1))

    def full(self, tokens: Sequence[int]) -> int:
        both = (Tier.DEVICE, Tier.HOST)
        return sum(1 for prefix in self.prefixes(tokens) if self.has(FULL, prefix, both))

    def insert(self, tokens: Sequence[int], first: int, pages: dict[str, list[int]], limit: int) -> dict[str, set[int]]:
        """Keep the first `limit` pages; what comes back, by component."""
        spare: dict[str, set[int]] = {}
        prefixes = self.prefixes(tokens)
        for name, ids in pages.items():
            where = prefixes[first:] if name == FULL else prefixes[len(prefixes) - len(ids) :] if ids else []
            for prefix, page in zip(where, ids, strict=True):
                mine = self.at[name, Tier.DEVICE]
                if len(prefix) <= limit * self.page and prefix not in mine:
                    mine[prefix] = page
                elif mine.get(prefix) != page:
                    spare.setdefault(name, set()).add(page)
        return spare

    def land(self, tokens: Sequence[int], first: int, ids: Sequence[int]) -> set[int]:
        """Pages from storage; what comes back."""
        host, prefixes = self.at[FULL, Tier.HOST], self.prefixes(tokens)
        above = (Tier.DEVICE, Tier.HOST) if self.back else (Tier.HOST,)
        if not all(self.has(FULL, prefix, above) for prefix in prefixes[:first]):
            return set(ids)
        spare = set()
        for prefix, page in zip(prefixes[first:], ids, strict=False):
            if prefix in host:
                spare.add(page)
            else:
                host[prefix] = page
        return spare

    def land_held(self, name: str, prefixes: Sequence[Prefix], ids: Sequence[int]) -> set[int]:
        """Ids of a further component for the last pages, from storage; what comes back."""
        host, spare = self.at[name, Tier.HOST], set[int]()
        for prefix, page in zip(prefixes[len(prefixes) - len(ids) :], ids, strict=True):
            if prefix in self.at[FULL, Tier.HOST] and prefix not in host:
                host[prefix] = page
            else:
                spare.add(page)
        return spare

    def lock(self, number: int, prefix: Prefix, tier: Tier) -> None:
        lock = self.locks[number] = Lock(prefix, tier)
        prefixes = self.prefixes(prefix)
        for name, component in self.components.items():
            if prefixes:
                reach = 1 if isinstance(component, State) else -(-component.reach_tokens // self.page)
                mine = self.at[name, tier]
                lock.held[name] = {mine[each] for each in prefixes[-reach:] if each in mine}

    def freed(self, name: str, tier: Tier, ids: Sequence[int]) -> None:
        """These were given up: nobody may need them."""
        mine = self.at[name, tier]
        by_id = {page: prefix for prefix, page in mine.items()}
        for page in ids:
            prefix = by_id[page]
            for lock in self.locks.values():
                on_path = lock.prefix[: len(prefix)] == prefix
                if name == FULL:
                    assert not (on_path and (lock.tier is tier or prefix not in self.at[FULL, Tier.DEVICE])), (
                        prefix,
                        lock,
                    )
                else:
                    assert lock.tier is not tier or page not in lock.held.get(name, ()), (prefix, lock)
            for copy in self.copies.values():
                moving = {each for each, _ in copy.pages.get(name, [])}
                assert copy.dst is tier or prefix not in moving, "a copy reads it"
            del mine[prefix]

    def end(self, copy: Copy, landed: int) -> list[tuple[str, Tier, int]]:
        """What comes back of this copy and of those that waited for it."""
        copy.landed = landed
        spare = list[tuple[str, Tier, int]]()
        again = True
        while again:
            again = False
            for each in list(self.copies.values()):
                if each.landed is not None and not self.waits(each):
                    del self.copies[each.op]
                    spare += self.settle(each)
                    again = True
        return spare

    def waits(self, copy: Copy) -> bool:
        """Whether attention KV that it stands on is still on its way by another."""
        others = {
            prefix
            for other in self.copies.values()
            if other.op != copy.op and other.dst is copy.dst
            for prefix, _ in other.pages.get(FULL, [])
        }
        own = {prefix for prefix, _ in copy.pages.get(FULL, [])}
        above = {prefix[: -self.page] for prefix in own} - own
        rest = {prefix for name in self.components for prefix, _ in copy.pages.get(name, [])} - own
        return bool((above | rest) & others)

    def settle(self, copy: Copy) -> list[tuple[str, Tier, int]]:
        assert copy.landed is not None
        spare = list[tuple[str, Tier, int]]()
        for name in (FULL, *self.components):
            for prefix, page in copy.pages.get(name, []):
                mine, full = self.at[name, copy.dst], self.at[FULL, copy.dst]
                above = prefix[: -self.page] if name == FULL else prefix
                has_way = not above or above in full
                if len(prefix) <= copy.landed * self.page and has_way and prefix not in mine:
                    mine[prefix] = page
                elif mine.get(prefix) != page:
                    spare.append((name, copy.dst, page))
        return spare

    def consistent(self) -> None:
        for tier in (Tier.DEVICE, Tier.HOST):
            full = self.at[FULL, tier]
            if tier is Tier.DEVICE or not self.back:
                assert all(prefix[: -self.page] in full for prefix in full if len(prefix) > self.page)
            for name in self.components:
                assert all(prefix in full for prefix in self.at[name, tier])
            hashes = {as_int64(chain(b"", *self.words(prefix))[-1]) for prefix in full}
            assert hashes == self.told[tier]
