"""KV events tell a router a cache's contents, in the encoding that vLLM, SGLang and Dynamo share.

An event is a msgpack map with its class's name under `type`; a batch is an array `[ts, events, rank]`. Fields that vLLM
0.33 requires are always present, others if set; consumers ignore unknown fields. llm-d reads SGLang's events as arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import structs

from kvmover.cache.prefix.hashes import HASH_BYTES, as_int64, as_int64s
from kvmover.cache.prefix.node import Node, page_hashes
from kvmover.cache.prefix.packed_rows import joined, pack_hashes, pack_words, packed, unpacked
from kvmover.cache.prefix.results import Action, ActionList, CopyOut, Tier
from kvmover.cache.prefix.tree_config import TreeConfig
from kvmover.errors import PrefixError
from kvmover.fields import member


class Medium(StrEnum):
    """A place of pages, as SGLang spells it. vLLM 0.33 says CPU and STORAGE for the second and third."""

    GPU = "GPU"
    CPU_PINNED = "CPU_PINNED"
    DISK = "DISK"
    #: A pool shared with other machines.
    EXTERNAL = "EXTERNAL"


#: Fields that events call otherwise.
_ROWS = {"hash_row": "block_hashes", "token_row": "token_ids"}


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An immutable event, compared by value."""


class BlockStored(_Event, frozen=True, tag="BlockStored", rename=_ROWS):
    """The pages that can now be read from `medium`, by position, each after the one before.

    "Block" is the routers' word for a page. `hash_row` has `hashes.as_int64` of page hashes and `token_row` the tokens
    of all pages, both as `packed` writes them; `block_hashes` and `token_ids` read them. `block_size` is the tokens a
    page. `parent_block_hash` names the page before the first, None at the beginning. `extra_keys` has for each page
    what its hash covers beside the tokens, as in vLLM 0.33: adapter, model and extra keys of the namespace; None for a
    namespace without the latter two.
    """

    hash_row: msgspec.Raw
    parent_block_hash: int | None
    token_row: msgspec.Raw
    block_size: int
    #: Superseded by `lora_name`, but required by decoders.
    lora_id: int | None
    medium: Medium | None
    lora_name: str | None
    cache_salt: str | None = None
    session_id: str | None = None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None

    @property
    def block_hashes(self) -> tuple[int, ...]:
        """Returns the names of the pages."""
        return unpacked(self.hash_row)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Returns the tokens of all pages."""
        return unpacked(self.token_row)

    def cut(self, first: int, stop: int) -> BlockStored:
        """Returns the event of its pages [first, stop)."""
        names, size = self.block_hashes, self.block_size
        return structs.replace(
            self,
            hash_row=packed(names[first:stop]),
            parent_block_hash=names[first - 1] if first else self.parent_block_hash,
            token_row=packed(self.token_ids[first * size : stop * size]),
            extra_keys=None if self.extra_keys is None else self.extra_keys[first:stop],
        )


class BlockRemoved(_Event, frozen=True, tag="BlockRemoved", rename=_ROWS):
    """The pages that can no longer be read from `medium`; other media may still have them. See BlockStored."""

    hash_row: msgspec.Raw
    medium: Medium | None

    @property
    def block_hashes(self) -> tuple[int, ...]:
        """Returns the names of the pages."""
        return unpacked(self.hash_row)


class AllBlocksCleared(_Event, frozen=True, tag="AllBlocksCleared"):
    """An event that empties the cache on every medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A batch of events in order of occurrence; `ts` in s since 1970. vLLM names the rank differently."""

    ts: float
    events: tuple[KVEvent, ...]
    attn_dp_rank: int | None = None


def coalesce(events: Iterable[KVEvent]) -> list[KVEvent]:
    """Returns the same history in fewer events: a page stored right after its parent joins it, as do removals.

    Only neighbours on one medium join: a page removed and stored again stays two events.

    >>> a = BlockStored(packed([1]), None, packed([5, 6]), 2, None, Medium.GPU, None)
    >>> coalesce([a, BlockStored(packed([2]), 1, packed([7, 8]), 2, None, Medium.GPU, None)])[0].block_hashes
    (1, 2)
    """
    return [_joined(run) for run in _runs(events)]


def _runs(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Yield lists of neighbours that may join; linear in a prefix's length, as tuples are made at the end."""
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
            follows = event.parent_block_hash == before.block_hashes[-1]
            return follows and _shared(before) == _shared(event)
        case _:
            return False


def _shared(event: BlockStored) -> tuple[object, ...]:
    told = event.block_size, event.lora_id, event.medium, event.lora_name, event.cache_salt, event.session_id
    return *told, event.extra_keys is None


def _joined(run: list[KVEvent]) -> KVEvent:
    first = run[0]
    if len(run) == 1 or isinstance(first, AllBlocksCleared):
        return first
    hashes = joined([event.hash_row for event in run if not isinstance(event, AllBlocksCleared)])
    if isinstance(first, BlockRemoved):
        return BlockRemoved(hashes, first.medium)
    stored = [event for event in run if isinstance(event, BlockStored)]
    tokens = joined([event.token_row for event in stored])
    extra = None if first.extra_keys is None else tuple(keys for event in stored for keys in event.extra_keys or ())
    return structs.replace(first, hash_row=hashes, token_row=tokens, extra_keys=extra)


class EventForm(StrEnum):
    """A way to write an event: a map, or an array of its class's name and its fields, as engines did until 2026."""

    MAPS = "maps"
    ARRAYS = "arrays"


def as_form(events: Iterable[KVEvent], form: EventForm) -> list[object]:
    """Returns events in the form in which msgspec encodes them.

    An array has no place for `cache_salt` and `extra_keys`, so pages with either are left out: a router would take them
    for anyone's.

    >>> removed, cleared = as_form([BlockRemoved(packed([7]), Medium.GPU), AllBlocksCleared()], EventForm.ARRAYS)
    >>> msgspec.msgpack.decode(msgspec.msgpack.encode(removed)), cleared
    (['BlockRemoved', [7], 'GPU'], ('AllBlocksCleared',))
    """
    if form is EventForm.MAPS:
        return list(events)
    return [_array(event) for event in events if not isinstance(event, BlockStored) or not _is_apart(event)]


def _is_apart(event: BlockStored) -> bool:
    return event.cache_salt is not None or event.extra_keys is not None


def _array(event: KVEvent) -> tuple[object, ...]:
    fields = structs.astuple(event)
    return type(event).__name__, *(fields[:_IN_ARRAYS] if isinstance(event, BlockStored) else fields)


#: Fields of a BlockStored that arrays have, up to `lora_name`.
_IN_ARRAYS = 7

#: Called with each event as it happens, in the caller's thread.
Sink: TypeAlias = Callable[[KVEvent], None]

MEDIA = {Tier.DEVICE: Medium.GPU, Tier.HOST: Medium.CPU_PINNED, Tier.STORAGE: Medium.DISK}


def path_stored(node: Node, config: TreeConfig, tier: Tier, first_page: int, stop_page: int) -> BlockStored:
    """Returns the event of the pages [first_page, stop_page) of the path to `node`, stored on a tier."""
    tokens, hashes, page_bytes = list[bytes](), list[bytes](), config.page_bytes
    parent = None
    while node.parent is not None and node.end > first_page:
        first, stop = max(0, first_page - node.start), max(0, min(node.end, stop_page) - node.start)
        row = page_hashes(node, config.page_words)
        hashes.append(row[first * HASH_BYTES : stop * HASH_BYTES])
        tokens.append(node.tokens[first * page_bytes : stop * page_bytes])
        if first:
            parent = as_int64(row[(first - 1) * HASH_BYTES :])
        node = node.parent
    if first_page and parent is None:
        parent = as_int64(page_hashes(node, config.page_words)[-HASH_BYTES:])
    while node.parent is not None:
        node = node.parent
    space = node.namespace
    assert space is not None
    hash_row, words = b"".join(reversed(hashes)), b"".join(reversed(tokens))
    keys = (*filter(None, (space.adapter, space.model)), *space.extra)
    return BlockStored(
        msgspec.Raw(pack_hashes(hash_row)),
        parent,
        # A bigram's second token is the next one's first: the first of each are the tokens.
        msgspec.Raw(pack_words(words, int(config.units))),
        config.page_tokens,
        None,
        MEDIA[tier],
        space.adapter or None,
        space.salt or None,
        extra_keys=(keys,) * (len(hash_row) // HASH_BYTES) if space.model or space.extra else None,
    )


def block_removed(hashes: Sequence[bytes], tier: Tier) -> BlockRemoved:
    """Returns the event of pages removed from a tier. Raises PrefixError if `tier` is no Tier."""
    return BlockRemoved(packed(as_int64s(hashes)), MEDIA[member(Tier, tier, "tier", PrefixError)])


Given = TypeVar("Given", bound=ActionList)


class Journal:
    """The events of a tree, for one sink. A split makes no event: page hashes stay the same."""

    def __init__(self, config: TreeConfig, sink: Sink) -> None:
        self._config = config
        self._sink = sink
        self._waiting = deque[KVEvent]()
        self._owed: tuple[Action, ...] = ()

    @property
    def owes_copies(self) -> bool:
        """Returns True if the caller has not received a CopyOut that was decided."""
        return any(isinstance(action, CopyOut) for action in self._owed)

    def told(self, given: Given) -> Given:
        """Deliver waiting events to the sink. Returns `given`, after any actions that earlier calls could not return.

        If the sink raises, undelivered events and the actions are kept for the next call.
        """
        self._owed += given.actions
        while self._waiting:
            event = self._waiting.popleft()
            try:
                self._sink(event)
            except BaseException:
                self._waiting.appendleft(event)
                raise
        owed, self._owed = self._owed, ()
        return given if len(owed) == len(given.actions) else structs.replace(given, actions=owed)

    def stored(self, node: Node, tier: int) -> None:
        """Record that all pages of a node have come to a tier."""
        self._waiting.append(path_stored(node, self._config, Tier(tier), node.start, node.end))

    def removed(self, node: Node, first: int, tier: int) -> None:
        """Record that a node's pages from its own `first` on leave a tier."""
        names = page_hashes(node, self._config.page_words)[first * HASH_BYTES :]
        self._waiting.append(BlockRemoved(msgspec.Raw(pack_hashes(names)), MEDIA[Tier(tier)]))

    def cleared(self) -> None:
        """Record that all tiers were cleared."""
        self._waiting.append(AllBlocksCleared())
