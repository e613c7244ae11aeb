"""CopyRecords tracks copies between tiers and reads from storage in flight, by positions, hashes and page ids.

A record names the end of a path, which it locks, and pages [first, stop) of it; it owns its destination ids. At its
end, whatever was split, evicted or inserted meanwhile, each page is found again by position: its id goes to the node
that covers it, or is freed. (sglang#16946: a record that named a node lost the front of it.) Pages that storage brings
to the host below an existing path are found again by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvmover.cache.prefix.columns import ID_BYTES
from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.hashes import each_hash
from kvmover.cache.prefix.keys import PageIds, RadixKey, page_array, words
from kvmover.cache.prefix.locks import Locks
from kvmover.cache.prefix.match import positions, walk
from kvmover.cache.prefix.node import LockedSegment, Node, page_hashes
from kvmover.cache.prefix.results import ActionList, CopyLeg, FreePages, Inserted, LockHandle, PageArray, Tier
from kvmover.cache.prefix.tree_config import WriteBack
from kvmover.errors import PrefixError, StaleHandle


class TierCopy(msgspec.Struct, frozen=True, eq=False):
    """A copy to carry out, and then to report to `end`. The record owns the destination ids until then.

    `first_page` is the position of the first of `hashes`, the names of the pages in storage; empty for other copies.
    """

    op: int
    src: Tier
    dst: Tier
    legs: tuple[CopyLeg, ...]
    first_page: int
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyPart:
    """The ids of one component for pages [first, stop): one a page, or one for the last."""

    index: int
    first: int
    stop: int
    src: bytes
    dst: bytes

    def cut(self, node: Node) -> bytes:
        """Returns the destination ids, one a page, of `node`, which must lie within."""
        return self.dst[(node.start - self.first) * ID_BYTES : (node.end - self.first) * ID_BYTES]


@dataclass(slots=True)
class CopyRecord:
    """A copy in flight. `landed` is the page up to which it succeeded, None until reported."""

    op: int
    src: Tier
    dst: Tier
    anchor: Node
    first: int
    parts: tuple[CopyPart, ...]
    handles: tuple[LockHandle, ...] = ()
    landed: int | None = None

    @property
    def stop(self) -> int:
        """Returns the page behind the path's end."""
        return self.anchor.end


class CopyRecords:
    """The records of copies in flight, by operation number. Numbers are never reused."""

    def __init__(self, forest: Forest, locks: Locks) -> None:
        self._forest = forest
        self._locks = locks
        self._next = 1
        self.records: dict[int, CopyRecord] = {}

    def needs(self, node: Node, dst: Tier) -> dict[str, int]:
        """Returns the ids, by component, that a copy of the path onto `dst` takes."""
        return {self._forest.config.name(i): count for i, count in self._count(self._sources(node, dst)).items()}

    def begin(self, node: Node, dst: Tier, page_ids: Mapping[str, PageIds]) -> TierCopy:
        """Begin a copy to `dst` of the path's pages on the other tier alone.

        A backup leaves out pages in flight to `dst`; pages below them wait for their end. Raises PrefixError if
        `page_ids` are not as many as `needs`, or a load finds pages in flight.
        """
        forest = self._forest
        src = Tier.HOST if dst is Tier.DEVICE else Tier.DEVICE
        sources = self._sources(node, dst)
        brought = {forest.config.index(name): words(ids) for name, ids in page_ids.items()}
        due = self._count(sources)
        got = {index: len(ids) // ID_BYTES for index, ids in brought.items() if ids}
        if got != due:
            names = [{forest.config.name(i): n for i, n in counts.items()} for counts in (due, got)]
            raise PrefixError(
                f"a copy of node {node.id} to the {dst.name.lower()} takes {names[0]} ids, got {names[1]}"
            )
        forest.claim([(dst, index, ids) for index, ids in brought.items()])
        parts = tuple(self._part(each, index, src, brought) for index, each in sources)
        first = min((each.start for _, each in sources), default=node.end)
        record = CopyRecord(self.number(), src, dst, node, first, parts)
        segments = tuple(LockedSegment(part.index, part.first, part.stop) for part in parts if part.index >= 0)
        record.handles = (self._locks.device(node, segments),)
        if src is Tier.HOST:
            record.handles += (self._locks.host(node, segments),)
        for index, each in sources:
            _mark(each, dst, index, record.op)
        self.records[record.op] = record
        return TierCopy(record.op, src, dst, self._legs(sources, record), record.first)

    def store(self, node: Node, first_page: int) -> TierCopy:
        """Begin a copy of the path's host pages from `first_page` on to storage, named by their hashes.

        Raises PrefixError if one is not on the host.
        """
        forest, path = self._forest, [each for each in reversed(node.path()) if each.end > first_page]
        if any(each.host is None for each in path):
            raise PrefixError(f"node {node.id} is not backed from page {first_page} on: nothing on the host to store")
        hashes = each_hash(b"".join(page_hashes(each, forest.config.page_words) for each in path))
        first = path[0].start if path else node.end
        sources = [
            (i, each)
            for i in range(-1, len(forest.config.components))
            for each in path
            if forest.ids(each, Tier.HOST, i) is not None
        ]
        parts = tuple(self._part(each, index, Tier.HOST, {}) for index, each in sources)
        record = CopyRecord(self.number(), Tier.HOST, Tier.STORAGE, node, first, parts)
        segments = tuple(LockedSegment(part.index, part.first, part.stop) for part in parts if part.index >= 0)
        record.handles = (self._locks.host(node, segments),)
        self.records[record.op] = record
        legs = self._legs(sources, record)
        return TierCopy(record.op, Tier.HOST, Tier.STORAGE, legs, first, tuple(hashes))

    def end(self, op: int, pages_done: int | None) -> ActionList:
        """See PrefixTree.end."""
        record = self.records.get(op)
        if record is None or record.landed is not None:
            raise StaleHandle(f"operation {op} is not under way")
        record.landed = record.stop if pages_done is None else min(record.stop, record.first + max(0, pages_done))
        freed: dict[tuple[str, Tier], list[bytes]] = {}
        # One record's end may release others below it on the same path.
        settled = True
        while settled:
            settled = False
            for each in [each for each in self.records.values() if each.landed is not None]:
                if each.dst is Tier.STORAGE or not self._waits(each):
                    del self.records[each.op]
                    self._settle(each, freed)
                    settled = True
        return ActionList(
            tuple(FreePages(name, tier, page_array(b"".join(ids))) for (name, tier), ids in freed.items())
        )

    def loading(self, node: Node, index: int) -> bytes | None:
        """Returns a component's ids that a load in flight will give `node`, or a front of one; else None."""
        record = self.records.get(_marked(node, Tier.DEVICE, index))
        if record is None or record.dst is not Tier.DEVICE:
            return None
        return next(
            (ids for part in record.parts if part.index == index for _, ids in self._pieces(part, [node])), None
        )

    def number(self) -> int:
        """Returns an unused operation number."""
        self._next += 1
        return self._next - 1

    def _sources(self, node: Node, dst: Tier) -> list[tuple[int, Node]]:
        """Returns the (component index, node) pairs to copy, root first, attention KV first.

        A backup that begins above pages in flight stops there: they may wait for it, so it must not wait for them.
        Raises PrefixError for a load of pages in flight.
        """
        forest, path = self._forest, node.path()[::-1]
        src = Tier.HOST if dst is Tier.DEVICE else Tier.DEVICE
        found = list[tuple[int, Node]]()
        for index in range(-1, len(forest.config.components)):
            first = 0
            if index >= 0 and dst is Tier.DEVICE:
                first = len(path) - forest.reach(path[::-1], forest.config.components[index].reach_tokens)
            for place, each in enumerate(path[first:], first):
                if forest.ids(each, src, index) is None or forest.ids(each, dst, index) is not None:
                    continue
                busy = _marked(each, dst, index)
                if not busy:
                    found.append((index, each))
                elif dst is Tier.DEVICE:
                    raise PrefixError(f"pages {each.start} to {each.end} are on their way: end operation {busy} first")
                elif found and index < 0:
                    path = path[:place]
                    break
        return found

    def _count(self, sources: Sequence[tuple[int, Node]]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for index, node in sources:
            counts[index] = counts.get(index, 0) + (node.end - node.start if self._per_page(index) else 1)
        return counts

    def _per_page(self, index: int) -> bool:
        return index < 0 or self._forest.config.components[index].per_page

    def _part(self, node: Node, index: int, src: Tier, brought: dict[int, bytes]) -> CopyPart:
        """Returns a node's part of a copy, taking its destination ids off `brought`."""
        ids = self._forest.ids(node, src, index) or b""
        mine = brought.get(index, b"")
        brought[index] = mine[len(ids) :]
        return CopyPart(index, node.start if self._per_page(index) else node.end - 1, node.end, ids, mine[: len(ids)])

    def _legs(self, sources: Sequence[tuple[int, Node]], record: CopyRecord) -> tuple[CopyLeg, ...]:
        """Returns a leg for each component, and for each sidecar that shares its ids."""
        legs, config = list[CopyLeg](), self._forest.config
        for index in sorted({part.index for part in record.parts}):
            parts = [part for part in record.parts if part.index == index]
            where = positions(self._forest, [node for i, node in sources if i == index], index)
            ids = [page_array(b"".join(each)) for each in ([p.src for p in parts], [p.dst for p in parts])]
            names = [config.name(index), *(s.name for s in config.sidecars if s.of == config.name(index))]
            legs += [CopyLeg(name, where, ids[0], ids[1]) for name in names]
        return tuple(legs)

    def _waits(self, record: CopyRecord) -> bool:
        """Returns True if attention KV that this record's pages depend on is in flight by another record.

        Attention KV depends on the page above, other components on their own node's. Waiting goes upwards only.
        """
        at: dict[int, Node] = {node.end: node for node in record.anchor.path()}
        below = {part.first if part.index < 0 else part.stop for part in record.parts}
        return any(_marked(at[end], record.dst, -1) not in (0, record.op) for end in below if end in at)

    def _settle(self, record: CopyRecord, freed: dict[tuple[str, Tier], list[bytes]]) -> None:
        """Give landed ids to the nodes that cover their pages, put other ids in `freed`, release the locks."""
        forest, name = self._forest, self._forest.config.name
        if record.dst is not Tier.STORAGE:
            assert record.landed is not None
            self._split_at(record.anchor, record.landed)
            path = record.anchor.path()[::-1]
            for part in record.parts:
                for node, ids in self._pieces(part, path):
                    _mark(node, record.dst, part.index, 0)
                    whole = node.end <= record.landed and self._may(node, record.dst, part.index)
                    if whole and forest.ids(node, record.dst, part.index) is None:
                        forest.give(node, record.dst, part.index, ids)
                    else:
                        spare = _unlike(ids, forest.ids(node, record.dst, part.index))
                        if spare:
                            freed.setdefault((name(part.index), record.dst), []).append(spare)
        for handle in record.handles:
            self._locks.release(handle)

    def _pieces(self, part: CopyPart, path: Sequence[Node]) -> Iterator[tuple[Node, bytes]]:
        for node in path:
            if part.first < node.end <= part.stop:
                yield node, part.cut(node) if self._per_page(part.index) else part.dst

    def _may(self, node: Node, tier: Tier, index: int) -> bool:
        """Returns True if `node` may hold the component: attention KV needs its parent's, others their node's."""
        above = node.parent if index < 0 else node
        return above is not None and self._forest.ids(above, tier, -1) is not None

    def _split_at(self, anchor: Node, page: int) -> None:
        """Make `page` a boundary of the path, whose lock keeps the eviction order unaffected."""
        node = anchor
        while node.start > page:
            assert node.parent is not None
            node = node.parent
        if node.start < page < node.end:
            self._forest.split(node, page - node.start)


def _mark(node: Node, dst: Tier, index: int, op: int) -> None:
    if index >= 0:
        node.held[index].busy = op
    elif dst is Tier.DEVICE:
        node.loading = op
    else:
        node.backing = op


def _marked(node: Node, dst: Tier, index: int) -> int:
    if index >= 0:
        return node.held[index].busy
    return node.loading if dst is Tier.DEVICE else node.backing


def _unlike(ids: bytes, others: bytes | None) -> bytes:
    """Returns the `ids` that the node does not hold at their position: an insert may have brought the record's own."""
    if others is None or len(others) != len(ids):
        return ids
    row: PageArray = page_array(ids)
    return row[row != page_array(others)].tobytes()


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """A read in flight: `ids` are host pages for `key` from page `first` on, owned by the record until its end.

    `held`: (component index, ids of the last pages).
    """

    key: RadixKey
    first: int
    ids: bytes
    handle: LockHandle
    held: tuple[tuple[int, bytes], ...] = ()


def offered(forest: Forest, key: RadixKey, page_ids: PageIds, first_page: int) -> bytes:
    """Returns `page_ids` as bytes. Raises PrefixError unless each whole page from `first_page` on has one."""
    pages, ids = len(key.data) // forest.page_bytes, words(page_ids)
    if not forest.hosted:
        raise PrefixError("this tree has no host tier")
    if not 0 <= first_page <= pages or len(ids) != (pages - first_page) * ID_BYTES:
        due = pages - first_page
        raise PrefixError(f"{pages} pages from {first_page} on take {due} ids, got {len(ids) // ID_BYTES}")
    return ids


def land(forest: Forest, key: RadixKey, first: int, ids: bytes) -> Inserted:
    """Keep host pages of `key` from page `first` on; ids of pages on the host already, or unreachable, are freed.

    Under write-through the pages before `first` must be on the host: if they are gone, all ids are freed (sglang#30106:
    a child was backed under a parent that was not).
    """
    page_bytes = forest.page_bytes
    stop = first * page_bytes + len(ids) // ID_BYTES * page_bytes
    path = walk(forest, key, stop)
    known = path[-1].end if path else 0
    through, spare = not isinstance(forest.config.tiers, WriteBack), list[bytes]()
    landing = path[-1] if path else None
    backed = all(node.host is not None for node in path if node.start < first) if through else True
    if not backed or known < first:
        forest.touch(path[::-1])
        return _landed(forest, landing, path, first, [ids])
    before = 0
    for node in path:
        if node.host is not None and before == node.start:
            before = node.end
        if node.end > first:
            mine = ids[max(0, node.start - first) * ID_BYTES : (node.end - first) * ID_BYTES]
            if node.host is None and node.start >= first:
                forest.give(node, Tier.HOST, -1, mine)
            else:
                spare.append(mine)
    if known * page_bytes < stop:
        at = landing if landing is not None else forest.root(key.namespace)
        node = forest.attach(at, key.data[known * page_bytes : stop])
        forest.give(node, Tier.HOST, -1, ids[(known - first) * ID_BYTES :])
        path.append(node)
    forest.touch(path[::-1])
    return _landed(forest, path[-1] if path else None, path, before, spare)


def land_held(forest: Forest, key: RadixKey, held: tuple[tuple[int, bytes], ...]) -> tuple[FreePages, ...]:
    """Keep ids of further components for the last pages of `key`, where its attention KV is on the host.

    Returns frees of the other ids.
    """
    page_bytes, freed = forest.page_bytes, list[FreePages]()
    pages = len(key.data) // page_bytes
    for index, ids in held:
        per_page = forest.config.components[index].per_page
        first, spare = pages - len(ids) // ID_BYTES if per_page else pages - 1, list[bytes]()
        if per_page:
            # Split there, so that each node is covered whole; the front counts as used.
            forest.touch(walk(forest, key, first * page_bytes)[::-1])
        path = walk(forest, key, pages * page_bytes)
        known = path[-1].end if path else 0
        for node in path:
            mine = ids[max(0, node.start - first) * ID_BYTES : max(0, node.end - first) * ID_BYTES]
            if not per_page:
                mine = ids if node.end == pages else b""
            if mine and node.host is not None and forest.ids(node, Tier.HOST, index) is None:
                forest.give(node, Tier.HOST, index, mine)
            elif mine:
                spare.append(mine)
        if known < pages:
            spare.append(ids[max(0, known - first) * ID_BYTES :] if per_page else ids)
        if spare:
            freed.append(FreePages(forest.config.name(index), Tier.HOST, page_array(b"".join(spare))))
    return tuple(freed)


def _landed(forest: Forest, end: Node | None, path: list[Node], known: int, spare: list[bytes]) -> Inserted:
    ids, page_tokens = b"".join(spare), forest.config.page_tokens
    actions = (FreePages(FULL, Tier.HOST, page_array(ids)),) if ids else ()
    reached = 0
    for node in path:
        if node.host is None:
            break
        reached = node.end
    return Inserted(actions, end.id if end is not None else 0, reached * page_tokens, known * page_tokens)
