"""The Journal tells a router which pages appear and vanish on which medium, in the order in which they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvmover.cache.prefix.config import TreeConfig
from kvmover.cache.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium
from kvmover.cache.prefix.hashes import PrefixNamespace, as_int64
from kvmover.cache.prefix.node import Node
from kvmover.cache.prefix.results import Tier

Sink: TypeAlias = Callable[[KVEvent], None]

MEDIA = {Tier.DEVICE: Medium.GPU, Tier.HOST: Medium.CPU_PINNED, Tier.STORAGE: Medium.DISK}


class Journal:
    """Writes to one sink. Splits say nothing: a page's hash is that of the tokens up to its end."""

    def __init__(self, config: TreeConfig, sink: Sink) -> None:
        self._config = config
        self._sink = sink

    def stored(self, node: Node, tier: Tier) -> None:
        hashes = node.page_hashes(self._config.page_words)
        parent = node.parent
        above = parent.page_hashes(self._config.page_words) if parent is not None else []
        namespace = _namespace(node)
        self._sink(
            BlockStored(
                tuple(map(as_int64, hashes)),
                as_int64(above[-1]) if above else None,
                # Of a bigram the second token is the next one's first: the first of each are the tokens.
                tuple(memoryview(node.tokens).cast("I")[:: int(self._config.units)]),
                self._config.page_tokens,
                None,
                MEDIA[tier],
                namespace.adapter or None,
                namespace.salt or None,
            )
        )

    def removed(self, hashes: Sequence[bytes], tier: Tier) -> None:
        self._sink(BlockRemoved(tuple(map(as_int64, hashes)), MEDIA[tier]))

    def cleared(self) -> None:
        self._sink(AllBlocksCleared())


def _namespace(node: Node) -> PrefixNamespace:
    while node.parent is not None:
        node = node.parent
    assert node.namespace is not None
    return node.namespace
