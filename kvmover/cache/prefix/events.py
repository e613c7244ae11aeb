"""KV events tell a router what a cache has, in the encoding that vLLM, SGLang and Dynamo share.

An event is a msgpack map with its class's name under `type`; a batch is an array `[ts, events, rank]`. Fields that vLLM
0.33 demands are always present, others only when they say something, and consumers ignore what they do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from kvmover.cache.prefix.config import TreeConfig
from kvmover.cache.prefix.hashes import PrefixNamespace, as_int64, as_int64s
from kvmover.cache.prefix.node import Node, page_hashes
from kvmover.cache.prefix.results import Tier


class Medium(StrEnum):
    """Where pages are, as SGLang spells it. vLLM 0.33 says CPU and STORAGE for the second and third."""

    GPU = "GPU"
    CPU_PINNED = "CPU_PINNED"
    DISK = "DISK"
    #: A pool that other machines share.
    EXTERNAL = "EXTERNAL"


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Values: equal events are equal, and none is changed after it was made."""


class BlockStored(_Event, frozen=True):
    """Pages that can now be read from `medium`, in order of position and each after the one before.

    "Block" is the routers' word for a page. `block_hashes` are `hashes.as_int64` of page hashes, `token_ids` the tokens
    of all these pages, `block_size` the tokens of one. The parent is the page before the first, none at the beginning.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    #: Superseded by `lora_name`, but a key that decoders ask for.
    lora_id: int | None
    medium: Medium | None
    lora_name: str | None
    cache_salt: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event, frozen=True):
    """Pages that can no longer be read from `medium`; other media may still have them."""

    block_hashes: tuple[int, ...]
    medium: Medium | None


class AllBlocksCleared(_Event, frozen=True):
    """Nothing is cached any more, on any medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events in the order in which they happened; `ts` in seconds since 1970. vLLM's name of the rank is another."""

    ts: float
    events: tuple[KVEvent, ...]
    attn_dp_rank: int | None = None


def coalesce(events: Iterable[KVEvent]) -> list[KVEvent]:
    """The same history in fewer events: a page stored right after its parent joins it, as do removals from one medium.

    Order is kept, and only neighbours join: a page that is removed and stored again stays two events.

    >>> a = BlockStored((1,), None, (5, 6), 2, None, Medium.GPU, None)
    >>> coalesce([a, BlockStored((2,), 1, (7, 8), 2, None, Medium.GPU, None)])[0].block_hashes
    (1, 2)
    """
    return [_joined(run) for run in _runs(events)]


def _runs(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Neighbours that may join. Lists first, one tuple at the end: a long prefix costs its length, not its square."""
    run = list[KVEvent]()
    for event in events:
        if run and not _follows(run[-1], event):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _follows(before: KVEvent, event: KVEvent) -> bool:
    match before, event:
        case BlockRemoved(), BlockRemoved():
            return before.medium == event.medium
        case BlockStored(), BlockStored():
            return event.parent_block_hash == before.block_hashes[-1] and _shared(before) == _shared(event)
        case _:
            return False


def _shared(event: BlockStored) -> tuple[object, ...]:
    return event.block_size, event.lora_id, event.medium, event.lora_name, event.cache_salt, event.session_id


def _joined(run: list[KVEvent]) -> KVEvent:
    first = run[0]
    if len(run) == 1 or isinstance(first, AllBlocksCleared):
        return first
    hashes = tuple(name for event in run if not isinstance(event, AllBlocksCleared) for name in event.block_hashes)
    if isinstance(first, BlockRemoved):
        return BlockRemoved(hashes, first.medium)
    tokens = tuple(token for event in run if isinstance(event, BlockStored) for token in event.token_ids)
    return msgspec.structs.replace(first, block_hashes=hashes, token_ids=tokens)


#: Called with each event as it happens, in the caller's thread.
Sink: TypeAlias = Callable[[KVEvent], None]

MEDIA = {Tier.DEVICE: Medium.GPU, Tier.HOST: Medium.CPU_PINNED, Tier.STORAGE: Medium.DISK}


def block_stored(
    hashes: Sequence[bytes],
    parent: bytes | None,
    tier: Tier,
    page_tokens: int,
    tokens: Sequence[int] = (),
    namespace: PrefixNamespace | None = None,
) -> BlockStored:
    """Pages in order of position, named by their hashes of 32 bytes; `parent` is the page before them, None at first.

    A tree tells `tokens` and `namespace` too; storage, whose pages were in a tree before, does not.
    """
    adapter, salt = (namespace.adapter, namespace.salt) if namespace is not None else ("", "")
    above = None if parent is None else as_int64(parent)
    return BlockStored(
        as_int64s(hashes), above, tuple(tokens), page_tokens, None, MEDIA[tier], adapter or None, salt or None
    )


def block_removed(hashes: Sequence[bytes], tier: Tier) -> BlockRemoved:
    """Pages that are not on a tier any more."""
    return BlockRemoved(as_int64s(hashes), MEDIA[tier])


class Journal:
    """A tree's events, to one sink. Splits say nothing: a page's hash is that of the tokens up to its end."""

    def __init__(self, config: TreeConfig, sink: Sink) -> None:
        self._config = config
        self._sink = sink

    def stored(self, node: Node, tier: Tier) -> None:
        """All pages of a node, which have come to a tier."""
        config, parent = self._config, node.parent
        above = page_hashes(parent, config.page_words) if parent is not None else ()
        # Of a bigram the second token is the next one's first: the first of each are the tokens.
        tokens = tuple(memoryview(node.tokens).cast("I")[:: int(config.units)])
        hashes = page_hashes(node, config.page_words)
        last = above[-1] if above else None
        self._sink(block_stored(hashes, last, tier, config.page_tokens, tokens, _namespace(node)))

    def removed(self, hashes: Sequence[bytes], tier: Tier) -> None:
        """Pages that have left a tier."""
        self._sink(block_removed(hashes, tier))

    def cleared(self) -> None:
        """Everything, of all tiers."""
        self._sink(AllBlocksCleared())


def _namespace(node: Node) -> PrefixNamespace:
    while node.parent is not None:
        node = node.parent
    assert node.namespace is not None
    return node.namespace
