"""A Node is a run of pages that every prompt so far either passes whole or does not enter.

Locks are noted by positions of the path, so that a split in between changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvmover.cache.prefix.hashes import PrefixNamespace, chain
from kvmover.cache.prefix.results import Tier


@dataclass(slots=True, eq=False)
class ComponentPages:
    """What one further component keeps at a node: page ids on each tier, or none, and how many locks count on them."""

    pages: bytes | None = None
    host: bytes | None = None
    locks: int = 0
    host_locks: int = 0
    #: The operation that will give it ids on the other tier; 0 for none.
    busy: int = 0


class Node:
    """Tokens and their pages; only the tree changes it. Compared by identity, so that it can be put in order.

    `tokens` are 32-bit words, `pages` and `host` int32 page ids of attention KV on the device and the host, as bytes:
    comparing, slicing and joining them are single calls. A node's `id` stands for its *end*: a split gives the front to
    a new node. `start` and `end` count pages from the root.
    """

    __slots__ = (
        "backing",
        "children",
        "created",
        "device_children",
        "end",
        "hashes",
        "held",
        "hits",
        "host",
        "host_locks",
        "id",
        "loading",
        "locks",
        "namespace",
        "pages",
        "parent",
        "priority",
        "start",
        "tokens",
        "used",
    )

    def __init__(self, node_id: int, parent: Node | None, tokens: bytes, start: int, end: int) -> None:
        self.id = node_id
        self.parent = parent
        self.tokens = tokens
        self.start = start
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.pages: bytes | None = None
        self.host: bytes | None = None
        #: Handles on this node, and one for each child that is locked.
        self.locks = 0
        self.host_locks = 0
        #: Children with pages on the device.
        self.device_children = 0
        self.hits = 0
        self.used = 0
        self.created = 0
        self.priority = 0
        #: Of each page; None until somebody asks.
        self.hashes: list[bytes] | None = None
        self.held: tuple[ComponentPages, ...] = ()
        #: Operations that will give this node pages on the host or the device; 0 for none.
        self.backing = 0
        self.loading = 0
        #: Of a root; None elsewhere.
        self.namespace: PrefixNamespace | None = None

    def page_hashes(self, page_words: int) -> list[bytes]:
        """Hash of each of its pages, of `page_words` 32-bit words, chained from the namespace.

        Computed when somebody asks, with those above that nobody asked for yet, and kept: no split changes them.
        """
        missing, above = list[Node](), self
        while above.parent is not None and above.hashes is None:
            missing.append(above)
            above = above.parent
        last = above.hashes[-1] if above.hashes else above.namespace.digest if above.namespace is not None else b""
        for each in reversed(missing):
            each.hashes = chain(last, memoryview(each.tokens).cast("I"), page_words)
            last = each.hashes[-1]
        return self.hashes or []

    def path(self) -> list[Node]:
        """This node and those above it but for the root, deepest first."""
        path = list[Node]()
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path


class LockedSegment(msgspec.Struct, frozen=True):
    """Pages [first, stop) of a path, of the further component with this index."""

    index: int
    first: int
    stop: int


class LockedPath(msgspec.Struct, frozen=True):
    """What one handle keeps: attention KV from the root to `node`, and segments of further components."""

    node: Node
    tier: Tier
    segments: tuple[LockedSegment, ...]
