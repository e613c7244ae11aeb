"""Nodes of a path that nothing tells apart any more are joined, so that a hot prefix does not age into a long chain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvmover.cache.prefix.config import EvictionGranularity
from kvmover.cache.prefix.forest import Forest, PrefixEnd
from kvmover.cache.prefix.node import ComponentPages, Node

#: Nodes of a path, or of a run in it, from which on joining is looked at.
SHORTEST_RUN = 8

#: Tokens of a shorter run that is joined all the same: copying 16 KiB takes less than the look-ups that it saves.
SMALL_RUN_BYTES = 16 << 10


def join(forest: Forest, path: Sequence[Node]) -> list[Node]:
    """Nodes of a path that has just been used, root first, where long runs that nothing tells apart are one node.

    Splits outlive what they were for: where prompts left a hot prefix and their ends were evicted, nodes with a
    single child are left, each of which costs every match a look-up. A run of `SHORTEST_RUN` or more is joined at
    once, so that a node costs its bytes an eighth of a time; one of few bytes is joined whenever the path is long.
    Where nodes are given up whole by choice, none is joined. Where they are for the sake of further components, a
    node that was joined holds no more than `_most_pages`.
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
    """Of a joined node in a tree with further components, like `node`: few bytes, and of what goes whole no more
    than an end needs. Else a lock would keep, and an eviction give up, windows far before the one that is meant.
    """
    reach = [
        component.reach_tokens
        for component, held in zip(forest.config.components, node.held, strict=True)
        if component.per_page and (held.pages is not None or held.host is not None)
    ]
    return min([SMALL_RUN_BYTES // forest.page_bytes, *(tokens // forest.config.page_tokens for tokens in reach)])


def _alike(forest: Forest, above: Node, node: Node) -> bool:
    """Whether no lock, copy, tier, child or rank tells `above` from its child `node`."""
    return (
        len(above.children) == 1
        and above.locks == (node.locks > 0)
        and not (above.host_locks or node.host_locks)
        and not (above.backing or above.loading or node.backing or node.loading)
        and (above.pages is None) == (node.pages is None)
        and (above.host is None) == (node.host is None)
        and (above.hashes is None) == (node.hashes is None)
        and min(above.hits, forest.hits_due) == min(node.hits, forest.hits_due)
        and (forest.by_recency or _ranked_by(above) == _ranked_by(node))
        and (not node.held or all(map(partial(_held_alike, forest), range(len(node.held)), above.held, node.held)))
    )


def _held_alike(forest: Forest, index: int, above: ComponentPages, held: ComponentPages) -> bool:
    """Whether ids of a component are one run. What stands at the end of `above` would stand inside it.

    No segment of a lock ends with `above`, which has no handle of its own, so where as many cover one as the other
    none begins behind it either.
    """
    if above.busy or held.busy or above.locks != held.locks or above.host_locks != held.host_locks:
        return False
    if not forest.config.components[index].per_page:
        return above.pages is None and above.host is None
    return (above.pages is None) == (held.pages is None) and (above.host is None) == (held.host is None)


def _joined(forest: Forest, run: list[Node]) -> list[Node]:
    """The last node of a run takes what all of them have; ids of the others go on as places inside it."""
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
        last.hashes = tuple(name for node in run for name in node.hashes or ())
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
        # Places inside it are found in the node that has its pages now.
        node.parent, node.start, node.tokens, node.children = last, node.end, b"", {}
    return [last]


def _ranked_by(node: Node) -> tuple[int, ...]:
    return node.hits, node.priority, node.created
