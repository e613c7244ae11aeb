"""What a plain tree does most, each in one straight line: match, lock, unlock, insert and evict.

A tree is plain where it keeps attention KV alone, on one tier, by LRU and by pages, and tells nobody: nothing else
then hangs on a node, and the steps are those of the Columns. All answers are those of the general way, which serves
every other tree and defines them. Here nothing is refused: where a call does not fit, the answer is None before
anything has changed, and the general way says what is wrong.
"""

from __future__ import annotations

from kvmover.cache.prefix.columns import ID_BYTES
from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.config import EvictionGranularity
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.keys import RadixKey, page_array, unlike
from kvmover.cache.prefix.locks import NUMBERS
from kvmover.cache.prefix.match import MISS, SHORTEST_RUN, descend, join
from kvmover.cache.prefix.node import LockedPath, Node
from kvmover.cache.prefix.results import ActionList, FreePages, Inserted, LockHandle, Match, Tier

_DEVICE = Tier.DEVICE
_NOTHING = ActionList()


class PlainSteps:
    """The steps of one plain tree, on the nodes and sums of its Forest."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._columns = forest.columns
        self._page_tokens = forest.config.page_tokens

    @classmethod
    def of(cls, forest: Forest) -> PlainSteps | None:
        """None for a tree that is not plain."""
        by_pages = forest.config.grain is EvictionGranularity.PAGE
        return cls(forest) if forest.plain and forest.by_recency and by_pages and forest.journal is None else None

    def match(self, key: RadixKey, limit_tokens: int | None) -> Match:
        """See PrefixTree.match."""
        forest, columns = self._forest, self._columns
        root = columns.roots.get(key.namespace)
        if root is None:
            return MISS
        pages = len(key.data) // forest.page_bytes
        if limit_tokens is not None:
            pages = max(0, min(pages, limit_tokens // self._page_tokens))
        path, inside, inner = columns.descend(root, key.data, pages * forest.page_bytes)
        if path:
            columns.touch(path[::-1])
            if len(path) >= SHORTEST_RUN:
                path = join(forest, path)
        if inside is not None:
            end = inside.start + inner
            node_id = forest.place(inside, end)
            path.append(inside)
        elif path:
            end, node_id = path[-1].end, path[-1].id
        else:
            return MISS
        tokens = end * self._page_tokens
        return Match(tokens, page_array(columns.gather(path, end)), node_id, tokens, node_id, tokens, node_id)

    def lock(self, node_id: int) -> LockHandle:
        """See PrefixTree.lock."""
        forest = self._forest
        node = forest.nodes.get(node_id) or forest.node(node_id)
        self._columns.lock(node)
        number = next(NUMBERS)
        forest.locked_paths[number] = LockedPath(node, _DEVICE, ())
        return LockHandle(number, node.id, _DEVICE)

    def unlock(self, handle: LockHandle) -> bool:
        """See PrefixTree.unlock. False where the handle is not out, or not of the device."""
        locked_paths = self._forest.locked_paths
        locked = locked_paths.get(handle.number)
        if locked is None or locked.node.id != handle.node or not (locked.tier is handle.tier is _DEVICE):
            return False
        del locked_paths[handle.number]
        self._columns.unlock(locked.node)
        return True

    def insert(self, key: RadixKey, ids: bytes, first_page: int) -> Inserted | None:
        """See PrefixTree.insert. None where the ids do not fit, or pages below `first_page` are not the tree's."""
        forest, columns, data = self._forest, self._columns, key.data
        page_bytes = forest.page_bytes
        pages = len(data) // page_bytes
        if not pages or not 0 <= first_page <= pages or len(ids) != (pages - first_page) * ID_BYTES:
            return None
        path, inside, inner = descend(forest, key, pages * page_bytes)
        known = inside.start + inner if inside is not None else path[-1].end if path else 0
        if known < first_page:
            return None
        if inside is not None:
            path.append(forest.split(inside, inner))
        double = _double(path, ids, first_page) if known > first_page else b""
        if known < pages:
            parent = path[-1] if path else forest.root(key.namespace)
            path.append(columns.grow(parent, data, pages, ids[(known - first_page) * ID_BYTES :]))
        columns.touch(path[::-1])
        actions = (FreePages(FULL, _DEVICE, page_array(double)),) if double else ()
        return Inserted(actions, path[-1].id, pages * self._page_tokens, known * self._page_tokens)

    def evict(self, pages: int) -> ActionList:
        """See PrefixTree.evict."""
        freed = self._columns.evict(pages)
        return ActionList((FreePages(FULL, _DEVICE, page_array(freed)),)) if freed else _NOTHING


def _double(path: list[Node], ids: bytes, first_page: int) -> bytes:
    """Of the ids that were brought for a path, from `first_page` on, those in whose place the tree has others."""
    double = list[bytes]()
    for node in path:
        if node.end > first_page:
            mine, own = ids[max(0, node.start - first_page) * ID_BYTES : (node.end - first_page) * ID_BYTES], node.pages
            assert own is not None
            if not own.endswith(mine):
                double.append(unlike(mine, own[-len(mine) :]))
    return b"".join(double)
