"""Names: page hashes of a node, computed when somebody asks, and kept: no split changes them."""

from __future__ import annotations

from kvmover.cache.prefix import hashes
from kvmover.cache.prefix.config import TreeConfig
from kvmover.cache.prefix.node import Node


def page_hashes(config: TreeConfig, node: Node) -> list[bytes]:
    """Hash of each page of `node`, chained from its namespace; with those above it that nobody asked for yet."""
    missing, above = list[Node](), node
    while above.parent is not None and above.hashes is None:
        missing.append(above)
        above = above.parent
    last = above.hashes[-1] if above.hashes else above.namespace.digest if above.namespace is not None else b""
    for each in reversed(missing):
        row = memoryview(each.tokens).cast("I")
        each.hashes = hashes.chain(last, row, config.page_tokens * config.units)
        last = each.hashes[-1]
    return node.hashes or []
