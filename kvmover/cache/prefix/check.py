"""`check` recomputes a tree's invariants from its nodes, handles and records. Tests run it, production does not.

The numbers are those of `INVARIANTS`. A snapshot cannot show 13, 17, 27, 28 and 29: tests compare them with models, and
13 needs the caller's pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from kvmover.cache.prefix.columns import ID_BYTES, EvictableSet
from kvmover.cache.prefix.copies import CopyRecord
from kvmover.cache.prefix.eviction_policy import LRU, Order, Recency
from kvmover.cache.prefix.forest import PYTHON_CORE, Forest
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.prefix.keys import page_array
from kvmover.cache.prefix.node import LockedPath, Node
from kvmover.cache.prefix.results import Tier
from kvmover.cache.prefix.tree_config import WriteBack
from kvmover.errors import InvariantBroken

INVARIANTS = {
    1: "a root has no parent and no pages, is locked for ever and never given up",
    2: "a node is its parent's child under its first page, and holds whole pages, at least one",
    3: "a node has attention KV on the device or the host",
    4: "what is on the device has its parent there",
    5: "what is backed has its parent backed, where pages are written through",
    6: "a further component stands on a tier only where attention KV does, or will when it lands",
    7: "a lock of a further component lies under a lock of its node",
    8: "what may be given up on the device is what is there and unlocked, and every leaf of it is in order",
    9: "what may be given up on the host is there alone and unlocked, and every childless one of it is in order",
    10: "what may be given up of a further component is what stands on a tier, there alone on the host, and unlocked",
    11: "evictable and protected pages are those of the nodes, by component and tier",
    12: "what is on its way is locked, and its operation is under way",
    13: "free, evictable, protected and owned pages are all pages of a pool",
    14: "a page id stands in one place",
    15: "there is one id a page, or one a state",
    16: "a page's hash is that of its namespace and all tokens up to its end",
    17: "a split changes no tokens, ids, hashes, sizes, matches or locks",
    18: "locks are the handles that are out, and the locked children",
    19: "no two children begin with the same page",
    20: "a path has one namespace",
    21: "what a copy reads stays where it is until its end",
    22: "a page is on its way to a tier by one operation",
    23: "one insertion at most is under way",
    24: "a node with children is never deleted",
    25: "device prefix, best prefix and full prefix are each at least as long as the one before, on one path",
    26: "all pages of a device prefix are on the device",
    27: "a request counts once as a use of a node",
    28: "a page is stored on a medium before it is removed there, and what was not removed is there",
    29: "equal calls give equal victims and ids",
    30: "ties are broken by time or id, never by a hash: the order is that of use, deepest first",
}


def check(forest: Forest, copies: Iterable[CopyRecord], fetches: Iterable[tuple[int, bytes]]) -> None:
    """Raise InvariantBroken with number, sentence and place of the first invariant that fails.

    `fetches`: (component index, host ids) of storage reads in flight.
    """
    nodes, records, fetched = list(forest), list(copies), list(fetches)
    _roots(forest)
    for node in nodes:
        _structure(forest, node)
        _tiers(forest, node)
        _widths(forest, node)
    _reachable(forest, nodes)
    _locks(forest, nodes)
    _orders(forest, nodes)
    _sizes(forest, nodes)
    _copies(forest, nodes, records)
    _places(forest, nodes, records, fetched)
    _in_use(forest, nodes, records, fetched)
    _hashes(forest, nodes)


def _demand(holds: bool, number: int, where: object) -> None:
    if not holds:
        raise InvariantBroken(f"invariant {number}: {INVARIANTS[number]}; {where}")


def _roots(forest: Forest) -> None:
    for namespace, root in [*forest.roots.items(), (None, forest.nodes[0])]:
        alone = root.parent is None and not root.tokens and root.pages == b"" and root.host == b"" and root.end == 0
        _demand(alone and root.locks > 0 and root.host_locks > 0, 1, f"root of {namespace}")
        _demand(
            root not in forest.device.order and root not in forest.host.order, 1, f"root of {namespace} in an order"
        )
        _demand(root.namespace == namespace, 20, f"root of {namespace} says {root.namespace}")


def _structure(forest: Forest, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    _demand(parent.children.get(forest.key(node)) is node, 2, f"node {node.id} under {parent.id}")
    pages, rest = divmod(len(node.tokens), forest.page_bytes)
    _demand(pages > 0 and not rest and node.end - node.start == pages, 2, f"node {node.id} of {len(node.tokens)} bytes")
    _demand(node.start == parent.end, 2, f"node {node.id} starts at {node.start}, its parent ends at {parent.end}")
    _demand(node.namespace is None, 20, f"node {node.id} inside a path names a namespace")
    first = {forest.key(child) for child in node.children.values()}
    _demand(len(first) == len(node.children), 19, f"children of node {node.id}")


def _tiers(forest: Forest, node: Node) -> None:
    parent, through = node.parent, not isinstance(forest.config.tiers, WriteBack)
    assert parent is not None
    _demand(node.pages is not None or node.host is not None, 3, f"node {node.id}")
    _demand(node.pages is None or parent.pages is not None, 4, f"node {node.id} under {parent.id}")
    _demand(node.host is None or parent.host is not None or not through, 5, f"node {node.id} under {parent.id}")
    _demand(node.host is None or forest.hosted, 3, f"node {node.id} is backed in a tree without a host")
    resident = sum(child.pages is not None for child in node.children.values())
    _demand(node.device_children == resident, 8, f"node {node.id} counts {node.device_children} of {resident} children")
    for index, held in enumerate(node.held):
        where = f"{forest.config.name(index)} of node {node.id}"
        _demand(held.pages is None or node.pages is not None, 6, where)
        _demand(held.host is None or node.host is not None, 6, where)


def _widths(forest: Forest, node: Node) -> None:
    size = (node.end - node.start) * ID_BYTES
    for index in range(-1, len(node.held)):
        due = size if index < 0 or forest.config.components[index].per_page else ID_BYTES
        for tier in (Tier.DEVICE, Tier.HOST):
            ids = forest.ids(node, tier, index)
            _demand(ids is None or len(ids) == due, 15, f"{forest.config.name(index)} of node {node.id}, {tier.name}")
    _demand(len(node.held) == len(forest.config.components), 15, f"node {node.id} has {len(node.held)} components")


def _reachable(forest: Forest, nodes: Sequence[Node]) -> None:
    _demand(
        {node.id: node for node in nodes} == {i: n for i, n in forest.nodes.items() if i}, 24, "ids and nodes differ"
    )
    _demand(all(0 < node.id < forest.columns.next_id for node in nodes), 29, f"an id is above {forest.columns.next_id}")


def _locks(forest: Forest, nodes: Sequence[Node]) -> None:
    own = {
        tier: Counter(locked.node.id for locked in forest.locked_paths.values() if locked.tier is tier) for tier in Tier
    }
    for node in nodes:
        device = own[Tier.DEVICE][node.id] + sum(child.locks > 0 for child in node.children.values())
        host = own[Tier.HOST][node.id] + sum(child.host_locks > 0 for child in node.children.values())
        _demand(
            (node.locks, node.host_locks) == (device, host),
            18,
            f"node {node.id} counts {node.locks}, {node.host_locks}",
        )
    counts: Counter[tuple[int, int, Tier]] = Counter()
    for locked in forest.locked_paths.values():
        _demand(
            forest.nodes.get(locked.node.id) is locked.node, 18, f"a handle for node {locked.node.id}, which is gone"
        )
        counts.update(_covered(locked))
    for node in nodes:
        for index, held in enumerate(node.held):
            due = counts[node.id, index, Tier.DEVICE], counts[node.id, index, Tier.HOST]
            where = f"{forest.config.name(index)} of node {node.id}"
            _demand(
                (held.locks, held.host_locks) == due, 18, f"{where} counts {held.locks}, {held.host_locks}, not {due}"
            )
            _demand(not held.locks or node.locks > 0, 7, where)
            _demand(not held.host_locks or node.host_locks > 0, 7, where)


def _covered(locked: LockedPath) -> Iterable[tuple[int, int, Tier]]:
    """Yield (node id, component index, tier) of all that a handle covers beside attention KV."""
    for segment in locked.segments:
        for node in locked.node.path():
            if segment.first < node.end <= segment.stop:
                yield node.id, segment.index, locked.tier


def _orders(forest: Forest, nodes: Sequence[Node]) -> None:
    for node in nodes:
        free = node.pages is not None and not node.locks
        listed = node in forest.device.order
        _demand(free or not listed, 8, f"node {node.id} is in order and must stay")
        _demand(not free or listed or node.device_children > 0, 8, f"leaf {node.id} is free and not in order")
        alone = node.pages is None and node.host is not None and not node.locks and not node.host_locks
        listed = node in forest.host.order
        _demand(alone or not listed, 9, f"node {node.id} is in order and must stay")
        _demand(not alone or listed or bool(node.children), 9, f"childless node {node.id} is free and not in order")
        for index, held in enumerate(node.held):
            where = f"{forest.config.name(index)} of node {node.id}"
            free = held.pages is not None and not held.locks
            _demand((node in forest.held_device[index].order) == free, 10, where)
            alone = held.pages is None and held.host is not None and not held.host_locks
            _demand((node in forest.held_host[index].order) == alone, 10, where)
    for account in (forest.device, forest.host):
        _demand(len(account.order) <= len(nodes), 8, "an order holds nodes that are gone")
        if forest.config.policy is LRU:
            _in_order(_listed(account.order))
    if forest.config.policy is LRU:
        # On the host a node unused since it came there is ordered by its arrival.
        used = [node.used for node in _listed(forest.device.order)]
        _demand(used == sorted(used), 30, f"the order on the device is by use, but says {used}")


def _in_order(order: Iterable[Node]) -> None:
    seen = set[int]()
    for node in order:
        parent = node.parent
        _demand(parent is None or parent.id not in seen, 30, f"node {node.id} stands behind its parent")
        seen.add(node.id)


def _listed(order: Order) -> Iterable[Node]:
    """Returns the nodes of an order by recency."""
    return cast("Recency", order)


def _sizes(forest: Forest, nodes: Sequence[Node]) -> None:
    fresh = Forest(forest.config, PYTHON_CORE)
    for node in nodes:
        fresh.columns.weigh(node, 1)
    kept = [forest.device, forest.host, *forest.held_device, *forest.held_host]
    due = [fresh.device, fresh.host, *fresh.held_device, *fresh.held_host]
    for i, (mine, right) in enumerate(zip(kept, due, strict=True)):
        _demand(_pages(mine) == _pages(right), 11, f"account {i} says {_pages(mine)}, the nodes {_pages(right)}")


def _pages(account: EvictableSet) -> tuple[int, int]:
    return account.evictable, account.protected


def _copies(forest: Forest, nodes: Sequence[Node], records: Sequence[CopyRecord]) -> None:
    live = {record.op: record for record in records}
    for node in nodes:
        for op, dst in ((node.backing, Tier.HOST), (node.loading, Tier.DEVICE)):
            _demand(not op or (op in live and live[op].dst is dst), 12, f"node {node.id} waits for operation {op}")
            _demand(not op or node.locks > 0, 12, f"node {node.id} is on its way and not locked")
            if op:
                parts = [p for p in live[op].parts if p.index < 0 and p.first <= node.start and node.end <= p.stop]
                _demand(len(parts) == 1, 22, f"node {node.id} is part of operation {op} {len(parts)} times")
    for record in records:
        _demand(forest.nodes.get(record.anchor.id) is record.anchor, 12, f"operation {record.op} has lost its path")
        path = record.anchor.path()
        for part in record.parts:
            per_page = part.index < 0 or forest.config.components[part.index].per_page
            found = [
                forest.ids(node, record.src, part.index)
                for node in reversed(path)
                if part.first < node.end <= part.stop
            ]
            there = b"".join(ids for ids in found if ids is not None)
            _demand(there == part.src, 21, f"operation {record.op} reads pages that moved")
            _demand(per_page or len(part.src) == ID_BYTES, 15, f"operation {record.op}")


def _places(
    forest: Forest, nodes: Sequence[Node], records: Sequence[CopyRecord], fetched: Sequence[tuple[int, bytes]]
) -> None:
    """Check that each id stands once: in the tree and, on the host, in records.

    An insert may have put a device id of a record into the tree early.
    """
    for index in range(-1, len(forest.config.components)):
        for tier in (Tier.DEVICE, Tier.HOST):
            places: Counter[int] = Counter()
            for node in nodes:
                places.update(page_array(forest.ids(node, tier, index) or b"").tolist())
            where = f"{forest.config.name(index)}, {tier.name}"
            _demand(all(count == 1 for count in places.values()), 14, f"{where}: {_twice(places)}")
            if tier is Tier.HOST:
                for record in records:
                    for part in record.parts:
                        if part.index == index and record.dst is tier:
                            places.update(page_array(part.dst).tolist())
                for own, ids in fetched:
                    if own == index:
                        places.update(page_array(ids).tolist())
                _demand(all(count == 1 for count in places.values()), 14, f"{where}, in flight: {_twice(places)}")


def _in_use(
    forest: Forest, nodes: Sequence[Node], records: Sequence[CopyRecord], fetched: Sequence[tuple[int, bytes]]
) -> None:
    """Check that the ids noted as in use are those that tree and operations hold."""
    for (tier, index), in_use in forest.in_use.items():
        rows = [forest.ids(node, tier, index) or b"" for node in nodes]
        rows += [part.dst for record in records if record.dst is tier for part in record.parts if part.index == index]
        rows += [ids for own, ids in fetched if tier is Tier.HOST and own == index]
        pages = {page for ids in rows for page in page_array(ids).tolist()}
        where = f"{forest.config.name(index)}, {tier.name}: {len(in_use)} are noted as in use, of {len(pages)}"
        _demand(len(in_use) == len(pages) and all(page in in_use for page in pages), 14, where)


def _twice(places: Counter[int]) -> list[int]:
    return [page for page, count in places.items() if count > 1]


def _hashes(forest: Forest, nodes: Sequence[Node]) -> None:
    page = forest.config.page_words
    for node in nodes:
        if node.hashes is None:
            continue
        path = [node, *node.path()[1:]]
        root = path[-1].parent
        assert root is not None
        assert root.namespace is not None
        tokens = b"".join(each.tokens for each in reversed(path))
        due = chain(root.namespace.digest, memoryview(tokens).cast("I"), page)
        _demand(node.hashes == b"".join(due[node.start :]), 16, f"node {node.id}")
