"""Fetch: pages that storage brings to the host, below a path that is there already; found again by their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.cache.prefix.actions import Free, Inserted, Receipt, Tier
from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.errors import PrefixError
from kvmover.cache.prefix.forest import ID_BYTES, Forest
from kvmover.cache.prefix.keys import Key, PageIds, page_array, words
from kvmover.cache.prefix.node import Node
from kvmover.cache.prefix.shape import WriteBack
from kvmover.cache.prefix.walk import walk


@dataclass(frozen=True, slots=True)
class Fetch:
    """A read under way: `ids` are host pages for `key` from page `first` on, and belong to the record until its end.

    `held`: of further components, by their index, ids of the last pages.
    """

    key: Key
    first: int
    ids: bytes
    receipt: Receipt
    held: tuple[tuple[int, bytes], ...] = ()


def offered(forest: Forest, key: Key, page_ids: PageIds, first_page: int) -> bytes:
    """The ids, checked: one for each whole page of `key` from `first_page` on."""
    pages, ids = len(key.data) // forest.page_bytes, words(page_ids)
    if not forest.hosted:
        raise PrefixError("this tree has no host tier")
    if not 0 <= first_page <= pages or len(ids) != (pages - first_page) * ID_BYTES:
        due = pages - first_page
        raise PrefixError(f"{pages} pages from {first_page} on take {due} ids, got {len(ids) // ID_BYTES}")
    return ids


def land(forest: Forest, key: Key, first: int, ids: bytes) -> Inserted:
    """Keep host pages of `key` from page `first` on. What is on the host already, or has no way there, comes back.

    Under write-through the pages before `first` must be on the host: where they are gone meanwhile, all ids come back
    (sglang#30106: a child was backed under a parent that was not).
    """
    page_bytes = forest.page_bytes
    stop = first * page_bytes + len(ids) // ID_BYTES * page_bytes
    path = walk(forest, key, stop)
    known = path[-1].end if path else 0
    through, spare = not isinstance(forest.shape.tiers, WriteBack), list[bytes]()
    landing = path[-1] if path else None
    backed = all(node.host is not None for node in path if node.start < first) if through else True
    if not backed or known < first:
        forest.touch(path[::-1])
        return _landed(forest, landing, path, first, [ids])
    before = 0
    for node in path:
        if node.host is not None and before == node.start:
            before = node.end
        if node.end > first:
            mine = ids[max(0, node.start - first) * ID_BYTES : (node.end - first) * ID_BYTES]
            if node.host is None and node.start >= first:
                forest.give(node, Tier.HOST, -1, mine)
            else:
                spare.append(mine)
    if known * page_bytes < stop:
        at = landing if landing is not None else forest.root(key.namespace)
        node = forest.attach(at, key.data[known * page_bytes : stop])
        forest.give(node, Tier.HOST, -1, ids[(known - first) * ID_BYTES :])
        path.append(node)
    forest.touch(path[::-1])
    return _landed(forest, path[-1] if path else None, path, before, spare)


def land_held(forest: Forest, key: Key, held: tuple[tuple[int, bytes], ...]) -> tuple[Free, ...]:
    """Keep ids of further components for the last pages of `key`, where its attention KV is on the host by now.

    What a node has already comes back, as does what has no node.
    """
    page_bytes, freed = forest.page_bytes, list[Free]()
    pages = len(key.data) // page_bytes
    for index, ids in held:
        per_page = forest.shape.components[index].per_page
        first, spare = pages - len(ids) // ID_BYTES if per_page else pages - 1, list[bytes]()
        if per_page:
            walk(forest, key, first * page_bytes)  # a boundary there, so that no node is covered in part
        path = walk(forest, key, pages * page_bytes)
        known = path[-1].end if path else 0
        for node in path:
            mine = ids[max(0, node.start - first) * ID_BYTES : max(0, node.end - first) * ID_BYTES]
            if not per_page:
                mine = ids if node.end == pages else b""
            if mine and node.host is not None and forest.ids(node, Tier.HOST, index) is None:
                forest.give(node, Tier.HOST, index, mine)
            elif mine:
                spare.append(mine)
        if known < pages:
            spare.append(ids[max(0, known - first) * ID_BYTES :] if per_page else ids)
        if spare:
            freed.append(Free(forest.shape.name(index), Tier.HOST, page_array(b"".join(spare))))
    return tuple(freed)


def _landed(forest: Forest, end: Node | None, path: list[Node], known: int, spare: list[bytes]) -> Inserted:
    ids, page_tokens = b"".join(spare), forest.shape.page_tokens
    actions = (Free(FULL, Tier.HOST, page_array(ids)),) if ids else ()
    reached = 0
    for node in path:
        if node.host is None:
            break
        reached = node.end
    return Inserted(actions, end.id if end is not None else 0, reached * page_tokens, known * page_tokens)
