"""A Node is a run of pages that every prompt so far either passes whole or does not enter.

Locks are noted by positions of the path, so that a split in between changes nothing.
"""

from __future__ import annotations

import msgspec

from kvmover.cache.prefix.hashes import WORD_BYTES, PrefixNamespace, chain_bytes
from kvmover.cache.prefix.results import Tier


class ComponentPages(msgspec.Struct, eq=False, gc=False):
    """What one further component keeps at a node: page ids on each tier, or none, and how many locks count on them."""

    pages: bytes | None = None
    host: bytes | None = None
    locks: int = 0
    host_locks: int = 0
    #: The operation that will give it ids on the other tier; 0 for none.
    busy: int = 0


class Node(msgspec.Struct, eq=False, gc=False):
    """Tokens and their pages; only the tree changes it. Compared by identity, so that it can be put in order.

    Python's cyclic collector does not look at nodes, which else stops an engine for 0.5 s at a million of them; so the
    Forest cuts their links when they are forgotten.

    `tokens` are 32-bit words, `pages` and `host` int32 page ids of attention KV on the device and the host, as bytes:
    comparing, slicing and joining them are single calls. A node's `id` stands for its *end*: a split gives the front to
    a new node. `start` and `end` count pages from the root.
    """

    id: int
    parent: Node | None
    tokens: bytes
    start: int
    end: int
    children: dict[bytes, Node] = {}
    pages: bytes | None = None
    host: bytes | None = None
    #: Handles on this node, and one for each child that is locked.
    locks: int = 0
    host_locks: int = 0
    #: Children with pages on the device.
    device_children: int = 0
    hits: int = 0
    used: int = 0
    created: int = 0
    priority: int = 0
    #: Of each page; None until somebody asks.
    hashes: tuple[bytes, ...] | None = None
    held: tuple[ComponentPages, ...] = ()
    #: Operations that will give this node pages on the host or the device; 0 for none.
    backing: int = 0
    loading: int = 0
    #: Of a root; None elsewhere.
    namespace: PrefixNamespace | None = None

    def __repr__(self) -> str:
        return f"Node({self.id}, pages {self.start} to {self.end})"

    def unlink(self) -> None:
        """Cut the links to the nodes around it: it is forgotten."""
        self.children.clear()
        self.parent = None

    def path(self) -> list[Node]:
        """This node and those above it but for the root, deepest first."""
        path = list[Node]()
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path


def page_hashes(node: Node, page_words: int) -> tuple[bytes, ...]:
    """Hash of each page of a node, of `page_words` 32-bit words, chained from the namespace.

    Computed when somebody asks, with those above that nobody asked for yet, and kept: no split changes them.
    """
    missing = list[Node]()
    above = node
    while above.parent is not None and above.hashes is None:
        missing.append(above)
        above = above.parent
    last = above.hashes[-1] if above.hashes else above.namespace.digest if above.namespace is not None else b""
    for each in reversed(missing):
        each.hashes = tuple(chain_bytes(last, each.tokens, page_words * WORD_BYTES))
        last = each.hashes[-1]
    return node.hashes or ()


class LockedSegment(msgspec.Struct, frozen=True):
    """Pages [first, stop) of a path, of the further component with this index."""

    index: int
    first: int
    stop: int


class LockedPath(msgspec.Struct, frozen=True, gc=False):
    """What one handle keeps: attention KV from the root to `node`, and segments of further components."""

    node: Node
    tier: Tier
    segments: tuple[LockedSegment, ...]
