"""An insertion adds a prompt's new pages to the tree, and returns each unused id exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.cache.prefix.columns import ID_BYTES
from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.hashes import HASH_BYTES
from kvmover.cache.prefix.keys import PageIds, RadixKey, common_bytes, page_array, unlike, words
from kvmover.cache.prefix.node import Node
from kvmover.cache.prefix.results import ROOT, FreePages, Inserted, PageArray, Tier
from kvmover.errors import PrefixError


@dataclass(slots=True)
class Trailing:
    """The ids of a further component for a request's last pages, from page `first` on.

    `kept`: [id], True if the tree holds the id now.
    """

    index: int
    first: int
    ids: bytes
    kept: npt.NDArray[np.bool_]

    def rest(self) -> PageArray:
        """Returns the ids that the tree does not hold."""
        return page_array(self.ids)[~self.kept]


class Offer(msgspec.Struct, frozen=True):
    """A request's whole pages of `key` to insert, with ids from page `first_page` on.

    The key covers pages [start, pages) of the path.
    """

    key: RadixKey
    start: int
    pages: int
    first_page: int
    ids: bytes
    counted_pages: int
    priority: int
    trailing: tuple[Trailing, ...]

    @classmethod
    def of(
        cls,
        forest: Forest,
        key: RadixKey,
        ids: bytes,
        *,
        first_page: int,
        counted_tokens: int,
        held: Mapping[str, PageIds] | None,
        priority: int,
    ) -> Offer:
        """Returns the offer of a prompt from the root. Raises PrefixError if ids do not fit the pages."""
        pages = _checked_pages(forest, key, ids, 0, first_page)
        counted = counted_tokens // forest.config.page_tokens
        return cls(key, 0, pages, first_page, ids, counted, priority, _all_trailing(forest, held, 0, pages))

    @classmethod
    def below(
        cls, forest: Forest, key: RadixKey, ids: bytes, start: int, held: Mapping[str, PageIds] | None, priority: int
    ) -> Offer:
        """Returns the offer of new pages below the first `start` pages. Raises PrefixError as `of`."""
        pages = _checked_pages(forest, key, ids, start, start)
        return cls(key, start, pages, start, ids, 0, priority, _all_trailing(forest, held, start, pages))


def _checked_pages(forest: Forest, key: RadixKey, ids: bytes, start: int, first_page: int) -> int:
    """Returns the end page of a key that begins at page `start`.

    Raises PrefixError unless `ids` has one id a page from `first_page` on.
    """
    pages = start + len(key.data) // forest.page_bytes
    if not start <= first_page <= pages or len(ids) != (pages - first_page) * ID_BYTES:
        page_tokens = forest.config.page_tokens
        raise PrefixError(
            f"{key.tokens} tokens fill {pages - start} pages of {page_tokens}; for those from {first_page} on"
            f" {pages - first_page} ids are due, got {len(ids) // ID_BYTES}"
        )
    return pages


def _all_trailing(forest: Forest, held: Mapping[str, PageIds] | None, start: int, pages: int) -> tuple[Trailing, ...]:
    return tuple(_trailing(forest, name, row, start, pages) for name, row in held.items()) if held else ()


def _trailing(forest: Forest, name: str, page_ids: PageIds, start: int, pages: int) -> Trailing:
    index, ids = forest.config.index(name), words(page_ids)
    count = len(ids) // ID_BYTES
    if index < 0:
        raise PrefixError(f"{FULL} has its ids in page_ids, not among further components")
    brought = pages - start
    most = brought if forest.config.components[index].per_page else min(brought, 1)
    if count > most:
        raise PrefixError(f"{name} keeps at most {most} ids for {brought} pages, got {count}")
    return Trailing(index, pages - count, ids, np.zeros(count, np.bool_))


#: Returns the ids that a load in flight will give a node, of a component (-1: attention KV); None without a load.
LoadingIds: TypeAlias = Callable[[Node, int], bytes | None]


class Insertion:
    """An insert along the nodes that match the key, from the root or `above`, and a new leaf for the rest."""

    def __init__(self, forest: Forest, offer: Offer, loading: LoadingIds, above: Node | None = None) -> None:
        self._forest = forest
        self._offer = offer
        self._loading = loading
        self._above = above
        self._end: Node | None = None
        self._path = list[Node]()
        self._known = 0
        self._double = list[bytes]()

    def run(self) -> Inserted:
        """Insert the new pages. Returns the result. The path becomes the most recently used.

        Raises PrefixError before any change, as PrefixTree.insert.
        """
        if self._offer.pages > self._offer.start:
            self._claim()
            self._walk()
        self._path = self._end.path() if self._end is not None else []
        self._forest.touch(self._path)
        return self._result()

    def _claim(self) -> None:
        """Claim the ids that the tree neither holds nor awaits at their position. Raises PrefixError as `run`."""
        forest, offer = self._forest, self._offer
        at, first = self._above or forest.roots.get(offer.key.namespace), offer.first_page
        known, path = offer.start, list[Node]()
        if at is not None:
            stop = (offer.pages - offer.start) * forest.page_bytes
            path, inside, pages = forest.columns.descend(at, offer.key.data, stop)
            if inside is not None:
                path.append(forest.front(inside, pages, ROOT))
            known = path[-1].end if path else known
        if known < first:
            raise PrefixError(f"pages below {first} are the tree's, but it knows {known} in this namespace")
        missing = next((node for node in path if node.start < first and node.pages is None), None)
        if missing is not None:
            where = f"{missing.start} to {missing.end}"
            raise PrefixError(f"pages below {first} are the tree's, but {where} are not on the device")
        rows = [(Tier.DEVICE, -1, self._foreign(path, known, -1, first, offer.ids))]
        for each in offer.trailing:
            rows.append((Tier.DEVICE, each.index, self._foreign(path, known, each.index, each.first, each.ids)))
        forest.claim(rows)

    def _foreign(self, path: Sequence[Node], known: int, index: int, first: int, ids: bytes) -> bytes:
        """Returns those `ids` of a component, from page `first` on, that nodes of `path` neither hold nor await."""
        per_page, pages = index < 0 or self._forest.config.components[index].per_page, self._offer.pages
        rows = list[bytes]()
        for node in path:
            low, high = max(0, node.start - first), node.end - first
            if not per_page:
                low, high = 0, len(ids) // ID_BYTES if node.end == pages else 0
            mine = ids[low * ID_BYTES : high * ID_BYTES] if low < high else b""
            own = self._forest.ids(node, Tier.DEVICE, index) or self._loading(node, index) if mine else None
            rows.append(unlike(mine, own[-len(mine) :]) if own else mine)
        if known < pages:
            rows.append(ids[max(0, known - first) * ID_BYTES :] if per_page else ids)
        return b"".join(rows)

    def _walk(self) -> None:
        forest, offer = self._forest, self._offer
        data, page_bytes = offer.key.data, forest.page_bytes
        stop, offset, counted = (offer.pages - offer.start) * page_bytes, 0, offer.counted_pages
        at = self._above or forest.root(offer.key.namespace)
        while offset < stop:
            child = at.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            if child is forest.columns.trimmed:
                forest.columns.whole()
            tokens = child.tokens
            if not data.startswith(tokens, offset, stop):
                cut = common_bytes(data, offset, stop, tokens, page_bytes) // page_bytes
                child = forest.split(child, cut)
            if offer.trailing:
                child = self._split_where_brought(child)
            self._pass(child)
            if child.end > counted:
                child.hits += 1
            if child.priority < offer.priority:
                child.priority = offer.priority
            offset += len(child.tokens)
            at = self._end = child
            self._known = child.end
        if offset < stop:
            self._grow(at)

    def _pass(self, node: Node) -> None:
        """Give a known node the new ids if it is not on the device; else note different ones as duplicates."""
        first = self._offer.first_page
        if node.end > first:
            mine = self._offer.ids[max(0, node.start - first) * ID_BYTES : (node.end - first) * ID_BYTES]
            if node.pages is None:
                self._forest.give(node, Tier.DEVICE, -1, mine)
            elif not node.pages.endswith(mine):
                self._double.append(unlike(mine, node.pages[-len(mine) :]))
        if self._offer.trailing:
            self._pass_held(node)

    def _grow(self, at: Node) -> None:
        """Add the rest as one new node, or several where a component needs a boundary."""
        forest, offer = self._forest, self._offer
        names = offer.key.known_hashes(forest.config.page_words) if not offer.start else None
        if not (forest.config.components or offer.start or offer.priority):
            ids = offer.ids[(at.end - offer.first_page) * ID_BYTES :]
            node = self._end = forest.columns.grow(at, offer.key.data, offer.pages, ids)
            if names is not None:
                node.hashes = names[node.start * HASH_BYTES : node.end * HASH_BYTES]
            if forest.journal is not None:
                forest.journal.stored(node, Tier.DEVICE)
            return
        cuts = self._boundaries(at.end)
        for low, high in pairwise(cuts):
            low_bytes, high_bytes = ((page - offer.start) * forest.page_bytes for page in (low, high))
            node = forest.attach(at, offer.key.data[low_bytes:high_bytes])
            node.hits, node.priority = 1, offer.priority
            if names is not None:
                node.hashes = names[low * HASH_BYTES : high * HASH_BYTES]
            ids = offer.ids[(low - offer.first_page) * ID_BYTES : (high - offer.first_page) * ID_BYTES]
            forest.give(node, Tier.DEVICE, -1, ids)
            if offer.trailing:
                self._pass_held(node)
            at = self._end = node

    def _boundaries(self, start: int) -> list[int]:
        """Returns the pages where new nodes begin and end: where brought ids begin, and a window before the end.

        A lock on the end of a long prompt then pins one window, not the whole node.
        """
        forest, offer = self._forest, self._offer
        if not forest.config.components:
            return [start, offer.pages]
        cuts = {start, offer.pages, *(each.first for each in self._offer.trailing if self._per_page(each))}
        for component in forest.config.components:
            if component.per_page:
                cuts.add(offer.pages - -(-component.reach_tokens // forest.config.page_tokens))
        return sorted(cut for cut in cuts if start <= cut <= offer.pages)

    def _split_where_brought(self, node: Node) -> Node:
        """Split a node where ids begin that it lacks. Returns the front, or the whole node."""
        cuts = [
            each.first
            for each in self._offer.trailing
            if self._per_page(each) and node.start < each.first < node.end and node.held[each.index].pages is None
        ]
        return self._forest.split(node, min(cuts) - node.start) if cuts else node

    def _per_page(self, trailing: Trailing) -> bool:
        """Returns False for a state, which has no boundary inside a node."""
        return self._forest.config.components[trailing.index].per_page

    def _pass_held(self, node: Node) -> None:
        """Give a node the further components' ids that it lacks, and mark the ids it holds as kept."""
        for trailing in self._offer.trailing:
            if self._per_page(trailing):
                low, high = max(0, node.start - trailing.first), node.end - trailing.first
            else:
                low, high = 0, len(trailing.kept) if node.end == self._offer.pages else 0
            if high <= low:
                continue
            mine, has = trailing.ids[low * ID_BYTES : high * ID_BYTES], node.held[trailing.index].pages
            if has is None:
                self._forest.give(node, Tier.DEVICE, trailing.index, mine)
                trailing.kept[low:high] = True
            else:
                trailing.kept[low:high] = page_array(mine) == page_array(has[-len(mine) :])

    def _result(self) -> Inserted:
        config, ids = self._forest.config, b"".join(self._double)
        actions = [FreePages(FULL, Tier.DEVICE, page_array(ids))] if ids else []
        for trailing in self._offer.trailing:
            rest = trailing.rest()
            if len(rest):
                actions.append(FreePages(config.name(trailing.index), Tier.DEVICE, rest))
        end, node_id = (self._end.end, self._end.id) if self._end is not None else (0, ROOT)
        known = self._known * config.page_tokens
        due = due_backup(self._forest, self._path) if self._forest.hits_due else ()
        return Inserted(tuple(actions), node_id, end * config.page_tokens, known, due)


def due_backup(forest: Forest, path: list[Node]) -> tuple[int, ...]:
    """Returns the deepest node in `path`, deepest first, with `hits_due` hits if it has yet to be backed up, else ().

    Windows and states that its end needs count too; a copy in flight counts as made.
    """
    for place, node in enumerate(path):
        if node.hits >= forest.hits_due:
            is_due = node.host is None and not node.backing
            return (node.id,) if is_due or _came_later(forest, path[place:]) else ()
    return ()


def _came_later(forest: Forest, path: list[Node]) -> bool:
    """Returns True if a window or state that the end of `path`, deepest first, needs is on the device alone."""
    return any(
        held.pages is not None and held.host is None and not held.busy
        for index, component in enumerate(forest.config.components)
        for node in path[: forest.reach(path, component.reach_tokens)]
        for held in node.held[index : index + 1]
    )
