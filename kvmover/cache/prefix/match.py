"""A match walks down the tree and finds how much of a prompt is cached, and how much of that is usable.

Nodes of its path that no longer differ are joined, so that a hot prefix does not age into a long chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from operator import ge

import numpy as np

from kvmover.cache.prefix.columns import Descent
from kvmover.cache.prefix.forest import Forest, PrefixEnd
from kvmover.cache.prefix.keys import NO_IDS, RadixKey, page_array
from kvmover.cache.prefix.node import ComponentPages, Node
from kvmover.cache.prefix.results import ROOT, LoadBack, Match, PageArray, Tier
from kvmover.cache.prefix.tree_config import EvictionGranularity, WriteBack


def descend(forest: Forest, key: RadixKey, stop: int) -> Descent:
    """Returns the nodes that match the first `stop` bytes of `key`. The tree is unchanged."""
    root = forest.roots.get(key.namespace)
    return forest.columns.descend(root, key.data, stop) if root is not None else ([], None, 0)


def walk(forest: Forest, key: RadixKey, stop: int) -> list[Node]:
    """Returns the nodes that match the first `stop` bytes of `key`; the last one is split where the match ends."""
    path, inside, pages = descend(forest, key, stop)
    if inside is not None:
        path.append(forest.split(inside, pages))
    return path


def matched(forest: Forest, descent: Descent) -> Match:
    """Returns the Match of a descent. An end inside a node gets an id of its own."""
    path, inside, pages = descent
    if inside is not None:
        path = [*path, forest.front(inside, pages, forest.place(inside, inside.start + pages))]
    if not path:
        return MISS
    rows = [node.pages for node in path]
    if forest.config.components or None in rows:
        return _anchors(forest, path)
    end, node_id = path[-1].end * forest.config.page_tokens, path[-1].id
    ids = page_array(forest.columns.gather(path, path[-1].end))
    return Match(end, ids, node_id, end, node_id, end, backed(forest, path) if forest.hosted else node_id)


def backed(forest: Forest, path: list[Node]) -> int:
    """Returns the node below which a fetch can continue: the deepest on the host, under write-back the last."""
    if isinstance(forest.config.tiers, WriteBack):
        return path[-1].id if path else ROOT
    return next((node.id for node in reversed(path) if node.host is not None), ROOT)


MISS = Match(0, NO_IDS, ROOT, 0, ROOT, 0, ROOT)


def _anchors(forest: Forest, path: list[Node]) -> Match:
    """Returns the Match of a path, with its deepest ends usable from the device and from either tier."""
    device = best = _usable(forest, path, (Tier.DEVICE,))
    if forest.hosted:
        best = _usable(forest, path, (Tier.DEVICE, Tier.HOST))
    page_tokens = forest.config.page_tokens
    ends = [0, *(node.end * page_tokens for node in path)]
    ids = [ROOT, *(node.id for node in path)]
    return Match(
        ends[device],
        page_array(b"".join(node.pages or b"" for node in path[:device])),
        ids[device],
        ends[best],
        ids[best],
        ends[-1],
        backed(forest, path[:best]) if forest.hosted else ids[device],
        loads(forest, path[:best]) if best > device else (),
        branches(forest, ends[-1], ends[best]),
        _held(forest, path[:device]),
        waits(path) if forest.hosted else (),
    )


def _usable(forest: Forest, path: list[Node], tiers: tuple[Tier, ...]) -> int:
    """Returns how many nodes of `path`, from the root, are usable from `tiers`.

    A component has to be there for the last pages that it reaches, or for all of a shorter path.
    """
    reach = forest.columns.reach_pages
    runs, usable = [inf] * len(reach), 0
    for count, node in enumerate(path, 1):
        if all(forest.ids(node, tier, -1) is None for tier in tiers):
            break
        for i, run in enumerate(runs):
            present = any(forest.ids(node, tier, i) is not None for tier in tiers)
            runs[i] = run + node.end - node.start if present else 0
        if all(map(ge, runs, reach)):
            usable = count
    return usable


def loads(forest: Forest, path: list[Node]) -> tuple[LoadBack, ...]:
    """Returns the loads that make the end of `path`, root first, usable on the device.

    They cover host-only attention KV and the parts of further components that the end needs.
    """
    found, deepest = list[LoadBack](), path[::-1]
    for i in range(-1, len(forest.config.components)):
        reach = len(path) if i < 0 else forest.reach(deepest, forest.config.components[i].reach_tokens)
        nodes = [node for node in reversed(deepest[:reach]) if forest.ids(node, Tier.DEVICE, i) is None]
        nodes = [node for node in nodes if forest.ids(node, Tier.HOST, i) is not None]
        if nodes:
            ids = b"".join(forest.ids(node, Tier.HOST, i) or b"" for node in nodes)
            found.append(LoadBack(forest.config.name(i), positions(forest, nodes, i), page_array(ids)))
            found += [
                LoadBack(sidecar.name, found[-1].positions, found[-1].host_page_ids)
                for sidecar in forest.config.sidecars
                if sidecar.of == found[-1].component
            ]
    return tuple(found)


def positions(forest: Forest, nodes: Sequence[Node], index: int) -> PageArray:
    """Returns positions, from the root, of a component's ids at `nodes`: all pages, or each node's last."""
    if index >= 0 and not forest.config.components[index].per_page:
        return np.array([node.end - 1 for node in nodes], np.int32)
    return np.concatenate([np.arange(node.start, node.end, dtype=np.int32) for node in nodes] or [NO_IDS])


def branches(forest: Forest, full_tokens: int, best_tokens: int) -> tuple[tuple[str, int], ...]:
    """Returns (component, tokens) to keep next: the last grid point in attention KV, if beyond `best_tokens`."""
    points = [
        (component.name, full_tokens // component.grid_tokens * component.grid_tokens)
        for component in forest.config.components
    ]
    return tuple((name, tokens) for name, tokens in points if tokens > best_tokens)


def waits(path: list[Node]) -> tuple[int, ...]:
    """Returns the operations in flight that bring pages of `path` to the device."""
    loading = {node.loading for node in path}
    loading |= {held.busy for node in path for held in node.held if held.pages is None}
    return tuple(sorted(loading - {0}))


def _held(forest: Forest, path: list[Node]) -> tuple[tuple[str, PageArray], ...]:
    """Returns, by further component, the ids that a request reads at the end of `path`."""
    found, deepest = list[tuple[str, PageArray]](), path[::-1]
    for i, component in enumerate(forest.config.components):
        reached = deepest[: forest.reach(deepest, component.reach_tokens)]
        found.append((component.name, page_array(b"".join(node.held[i].pages or b"" for node in reversed(reached)))))
    return tuple(found)


#: The shortest path that is searched for runs, and the shortest run that is joined whatever its size.
SHORTEST_RUN = 8

#: Token bytes of a shorter run that is joined too: copying 16 KiB takes less time than the look-ups it saves.
SMALL_RUN_BYTES = 16 << 10


def join(forest: Forest, path: Sequence[Node]) -> list[Node]:
    """Join long runs of indistinguishable nodes in a path just used, root first. Returns its remaining nodes.

    Splits outlive their cause: where prompts left a hot prefix and their ends were evicted, single-child nodes remain,
    each costing every match a look-up. Runs of `SHORTEST_RUN` or more are joined at once, which spreads the copy over
    as many nodes; runs of few bytes whenever the path is long; under EvictionGranularity.NODE, no run. With further
    components a joined node holds at most `_most_pages`.
    """
    if len(path) < SHORTEST_RUN or forest.config.grain is not EvictionGranularity.PAGE:
        return list(path)
    joined, run = list[Node](), [path[0]]
    for node in path[1:]:
        if not _alike(forest, run[-1], node) or (node.held and node.end - run[0].start > _most_pages(forest, node)):
            joined += _joined(forest, run)
            run = []
        run.append(node)
    return joined + _joined(forest, run)


def _most_pages(forest: Forest, node: Node) -> int:
    """Returns the most pages of a joined node, like `node`, in a tree with further components.

    Few bytes, and no more than an end needs: otherwise a lock would protect, and an eviction free, windows far before
    the end.
    """
    reach = [
        component.reach_tokens
        for component, held in zip(forest.config.components, node.held, strict=True)
        if component.per_page and (held.pages is not None or held.host is not None)
    ]
    return min([SMALL_RUN_BYTES // forest.page_bytes, *(tokens // forest.config.page_tokens for tokens in reach)])


def _alike(forest: Forest, above: Node, node: Node) -> bool:
    """Returns True if no lock, copy, tier, child or rank distinguishes `above` from its child `node`."""
    return (
        len(above.children) == 1
        and above.locks == (node.locks > 0)
        and not (above.host_locks or node.host_locks)
        and not (above.backing or above.loading or node.backing or node.loading)
        and (above.pages is None) == (node.pages is None)
        and (above.host is None) == (node.host is None)
        and (above.hashes is None) == (node.hashes is None)
        and min(above.hits, forest.hits_due) == min(node.hits, forest.hits_due)
        and (forest.by_use or _ranked_by(above) == _ranked_by(node))
        and (not node.held or all(map(partial(_held_alike, forest), range(len(node.held)), above.held, node.held)))
    )


def _held_alike(forest: Forest, index: int, above: ComponentPages, held: ComponentPages) -> bool:
    """Returns True if a component's ids at two neighbouring nodes can form one run.

    A state of `above` would end up inside the joined node. A lock's segment ends only at a node with a handle, which
    `above` lacks; so with equal counts no segment begins between the two.
    """
    if above.busy or held.busy or above.locks != held.locks or above.host_locks != held.host_locks:
        return False
    if not forest.config.components[index].per_page:
        return above.pages is None and above.host is None
    return (above.pages is None) == (held.pages is None) and (above.host is None) == (held.host is None)


def _joined(forest: Forest, run: list[Node]) -> list[Node]:
    """Join a run into its last node, unless it is short and large. Returns the remaining nodes.

    Other nodes' ids become places in it.
    """
    first, last, above = run[0], run[-1], run[:-1]
    small = (last.end - first.start) * forest.page_bytes <= SMALL_RUN_BYTES
    if not above or (len(run) < SHORTEST_RUN and not small):
        return run
    assert first.parent is not None
    del first.parent.children[forest.key(first)]
    last.tokens = b"".join(node.tokens for node in run)
    if last.pages is not None:
        last.pages = b"".join(node.pages or b"" for node in run)
    if last.host is not None:
        last.host = b"".join(node.host or b"" for node in run)
    if last.hashes is not None:
        last.hashes = b"".join(node.hashes or b"" for node in run)
    for i, held in enumerate(last.held):
        if forest.config.components[i].per_page:
            if held.pages is not None:
                held.pages = b"".join(node.held[i].pages or b"" for node in run)
            if held.host is not None:
                held.host = b"".join(node.held[i].host or b"" for node in run)
    last.start, last.parent, last.created = first.start, first.parent, first.created
    first.parent.children[forest.key(last)] = last
    for node in above:
        for order in (forest.device.order, forest.host.order, forest.doubles):
            order.discard(node)
        for account in (*forest.held_device, *forest.held_host):
            account.order.discard(node)
        del forest.nodes[node.id]
        forest.keep_place(node.id, PrefixEnd(last, node.end))
        # Places inside this node are resolved through its parent, which has its pages now.
        node.parent, node.start, node.tokens, node.children = last, node.end, b"", {}
    return [last]


def _ranked_by(node: Node) -> tuple[int, ...]:
    return node.hits, node.priority, node.created
