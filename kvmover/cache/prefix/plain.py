"""What a plain tree does most, each in one straight line: match, lock, unlock, insert and evict.

A tree is plain where it keeps attention KV alone, on one tier, by LRU and by pages, and tells nobody: nothing else
then hangs on a node. All answers are those of the general way, which serves every other tree and defines them. Here
nothing is refused: where a call does not fit, the answer is None before anything has changed, and the general way
says what is wrong.
"""

from __future__ import annotations

from collections import OrderedDict

from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.config import EvictionGranularity
from kvmover.cache.prefix.forest import ID_BYTES, Forest
from kvmover.cache.prefix.joins import SHORTEST_RUN, join
from kvmover.cache.prefix.keys import RadixKey, page_array, unlike
from kvmover.cache.prefix.locks import NUMBERS
from kvmover.cache.prefix.match import MISS, descend
from kvmover.cache.prefix.node import LockedPath, Node
from kvmover.cache.prefix.results import ActionList, FreePages, Inserted, LockHandle, Match, Tier

_DEVICE = Tier.DEVICE
_NOTHING = ActionList()


class PlainSteps:
    """The steps of one plain tree, on the nodes and sums of its Forest."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._page_tokens = forest.config.page_tokens

    @classmethod
    def of(cls, forest: Forest) -> PlainSteps | None:
        """None for a tree that is not plain."""
        by_pages = forest.config.grain is EvictionGranularity.PAGE
        return cls(forest) if forest.plain and forest.by_recency and by_pages and forest.journal is None else None

    def match(self, key: RadixKey, limit_tokens: int | None) -> Match:
        """See PrefixTree.match."""
        forest = self._forest
        pages = len(key.data) // forest.page_bytes
        if limit_tokens is not None:
            pages = max(0, min(pages, limit_tokens // self._page_tokens))
        path, inside, inner = descend(forest, key, pages * forest.page_bytes)
        if path:
            self._touch(path)
            if len(path) >= SHORTEST_RUN:
                path = join(forest, path)
        if inside is not None:
            end = inside.start + inner
            node_id = forest.place(inside, end)
            path = [*path, inside]
        elif path:
            end, node_id = path[-1].end, path[-1].id
        else:
            return MISS
        ids = page_array(_joined([node.pages or b"" for node in path])[: end * ID_BYTES])
        tokens = end * self._page_tokens
        return Match(tokens, ids, node_id, tokens, node_id, tokens, node_id)

    def lock(self, node_id: int) -> LockHandle:
        """See PrefixTree.lock."""
        forest = self._forest
        node = forest.nodes.get(node_id) or forest.node(node_id)
        account = forest.device
        nodes, at, locked = self._order(), node, 0
        at.locks += 1
        while at.locks == 1:
            locked += at.end - at.start
            nodes.pop(at, None)
            at = at.parent
            assert at is not None
            at.locks += 1
        account.evictable -= locked
        account.protected += locked
        number = next(NUMBERS)
        forest.locked_paths[number] = LockedPath(node, _DEVICE, ())
        return LockHandle(number, node.id, _DEVICE)

    def unlock(self, handle: LockHandle) -> bool:
        """See PrefixTree.unlock. False where the handle is not out, or not of the device."""
        forest = self._forest
        locked = forest.locked_paths.get(handle.number)
        if locked is None or locked.node.id != handle.node or not (locked.tier is handle.tier is _DEVICE):
            return False
        del forest.locked_paths[handle.number]
        forest.clock = clock = forest.clock + 1
        account = forest.device
        nodes, at, freed = self._order(), locked.node, 0
        at.locks -= 1
        while not at.locks:
            freed += at.end - at.start
            at.used = clock
            nodes.setdefault(at)
            at = at.parent
            assert at is not None
            at.locks -= 1
        account.evictable += freed
        account.protected -= freed
        return True

    def insert(self, key: RadixKey, ids: bytes, first_page: int) -> Inserted | None:
        """See PrefixTree.insert. None where the ids do not fit, or pages below `first_page` are not the tree's."""
        forest, data = self._forest, key.data
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
        at = path[-1] if path else forest.root(key.namespace)
        if known < pages:
            first, parent = known * page_bytes, at
            at = Node(forest.next_id, parent, data[first : pages * page_bytes], known, pages)
            forest.next_id += 1
            at.pages, at.created, at.hits = ids[(known - first_page) * ID_BYTES :], forest.clock, 1
            forest.nodes[at.id] = parent.children[data[first : first + page_bytes]] = at
            parent.device_children += 1
            forest.device.evictable += pages - known
            self._order()[at] = None
            path.append(at)
        self._touch(path)
        actions = (FreePages(FULL, _DEVICE, page_array(double)),) if double else ()
        return Inserted(actions, at.id, pages * self._page_tokens, known * self._page_tokens)

    def evict(self, pages: int) -> ActionList:
        """See PrefixTree.evict."""
        forest = self._forest
        account, nodes, order, page_bytes = forest.device, forest.nodes, self._order(), forest.page_bytes
        left, freed = min(pages, account.evictable), list[bytes]()
        while left > 0:
            node = next(iter(order))
            held, parent = node.end - node.start, node.parent
            if node.device_children:
                del order[node]  # it comes back with the end of its last child
                continue
            if held > left:
                freed.append(forest.trim(node, left))
                break
            assert node.pages is not None
            assert parent is not None
            freed.append(node.pages[: held * ID_BYTES])
            if node is forest.trimmed:
                forest.trimmed = None
            left -= held
            account.evictable -= held
            del order[node], nodes[node.id], parent.children[node.tokens[:page_bytes]]
            node.pages, node.hashes, node.tokens = None, None, b""
            parent.device_children -= 1
            if parent.parent is None:
                forest.forget_root(parent)
            elif not parent.locks:
                order.setdefault(parent)
        return ActionList((FreePages(FULL, _DEVICE, page_array(_joined(freed))),)) if freed else _NOTHING

    def _order(self) -> OrderedDict[Node, None]:
        return self._forest.device.order.nodes  # type: ignore[attr-defined]  # by recency

    def _touch(self, path: list[Node]) -> None:
        """A use of `path`, root first: its end stands before the nodes above it then."""
        forest = self._forest
        forest.clock = clock = forest.clock + 1
        nodes = self._order()
        move = nodes.move_to_end
        for node in reversed(path):
            node.used = clock
            if node in nodes:
                move(node)


def _joined(rows: list[bytes]) -> bytes:
    return rows[0] if len(rows) == 1 else b"".join(rows)


def _double(path: list[Node], ids: bytes, first_page: int) -> bytes:
    """Of the ids that were brought for a path, from `first_page` on, those in whose place the tree has others."""
    double = list[bytes]()
    for node in path:
        if node.end > first_page:
            mine, own = ids[max(0, node.start - first_page) * ID_BYTES : (node.end - first_page) * ID_BYTES], node.pages
            assert own is not None
            if not own.endswith(mine):
                double.append(unlike(mine, own[-len(mine) :]))
    return _joined(double) if double else b""
