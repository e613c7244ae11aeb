"""A Node is a run of pages that every inserted prompt either contains whole or does not enter.

Locks are recorded by page positions of the path, so they stay valid across splits.
"""

from __future__ import annotations

import msgspec

from kvmover.cache.prefix.hashes import HASH_BYTES, WORD_BYTES, PrefixNamespace, chain_bytes
from kvmover.cache.prefix.results import Tier


class ComponentPages(msgspec.Struct, eq=False, gc=False):
    """The page ids of a further component at a node, on each tier, and the locks on them."""

    pages: bytes | None = None
    host: bytes | None = None
    locks: int = 0
    host_locks: int = 0
    #: The operation that will add ids on the other tier; 0 without one.
    busy: int = 0


class Node(msgspec.Struct, eq=False, gc=False):
    """A run of tokens and their pages, changed by the tree alone. Compared by identity, so it can be put in order.

    Excluded from Python's cyclic collector, which would stop an engine for 0.5 s at a million nodes: the Forest cuts
    the links of forgotten nodes.

    `tokens` are 32-bit words, `pages` and `host` int32 page ids of attention KV on device and host, as bytes:
    comparing, slicing and joining are single calls. `id` names the node's *end*: a split gives the front to a new node.
    `start` and `end` count pages from the root.
    """

    id: int
    parent: Node | None
    tokens: bytes
    start: int
    end: int
    children: dict[bytes, Node] = {}
    pages: bytes | None = None
    host: bytes | None = None
    #: Handles on this node, plus one for each locked child.
    locks: int = 0
    host_locks: int = 0
    #: Children with pages on the device.
    device_children: int = 0
    hits: int = 0
    used: int = 0
    created: int = 0
    priority: int = 0
    #: The hashes of all pages, a row of 32 bytes a page; None until computed. A root has its namespace's digest.
    hashes: bytes | None = None
    held: tuple[ComponentPages, ...] = ()
    #: Operations that will add pages on the host or the device; 0 without one.
    backing: int = 0
    loading: int = 0
    #: The number of its last use in a ReuseHistory; 0 without one.
    use: int = 0
    #: The namespace of a root; None in other nodes.
    namespace: PrefixNamespace | None = None

    def __repr__(self) -> str:
        return f"Node({self.id}, pages {self.start} to {self.end})"

    def unlink(self) -> None:
        """Cut the links of a forgotten node to its parent and children."""
        self.children.clear()
        self.parent = None

    def path(self) -> list[Node]:
        """Returns this node and its ancestors without the root, deepest first."""
        path = list[Node]()
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path


def page_hashes(node: Node, page_words: int) -> bytes:
    """Returns the hashes of a node's pages, of `page_words` 32-bit words, chained from the namespace: 32 bytes a page.

    Hashes missing on the path are computed on demand and kept.
    """
    missing, page_bytes = list[Node](), page_words * WORD_BYTES
    above = node
    while above.hashes is None:
        missing.append(above)
        assert above.parent is not None
        above = above.parent
    last = above.hashes[-HASH_BYTES:]
    for each in reversed(missing):
        each.hashes = chain_bytes(last, each.tokens[: (each.end - each.start) * page_bytes], page_bytes)
        last = each.hashes[-HASH_BYTES:]
    assert node.hashes is not None
    return node.hashes


class LockedSegment(msgspec.Struct, frozen=True):
    """The pages [first, stop) of a path, of the further component with this index."""

    index: int
    first: int
    stop: int


class LockedPath(msgspec.Struct, frozen=True, gc=False):
    """The pages that one handle locks: attention KV from the root to `node`, and segments of further components."""

    node: Node
    tier: Tier
    segments: tuple[LockedSegment, ...]
