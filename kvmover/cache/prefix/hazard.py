"""A HazardOrder ranks a node by the chance that it is used again for each moment that it stays, learnt from past uses.

A conversation is likelier to go on the more turns it had, and a cache that forgets evicted pages cannot count them. A
ReuseHistory remembers the last uses of nodes, evicted ones too, each with its kind: the turn (a leaf's is one more than
that of the pages before it), and whether most of the prompt was known. Of each kind it learns how many pages are used
again at which age, and from that the index of Gittins (Bandit processes and dynamic allocation indices, 1979): the most
uses a page can expect for each moment it is kept from now on. The smallest is evicted first.

Where nearly all reuses are still in the tree, the order is that of Recency. So it is where this order finds less: by
the sizes of the last uses it is known at which age Recency would evict a page. Pages that are found older were won, and
pages that are missed younger were lost; with more lost than won Recency rules for a while, twice as long each time.
Integers alone, so that `core/hazard.c`
says the same. A history has 16,384 uses and 131,072 marks, 2 MB, however large the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from kvmover.cache.prefix.node import Node

#: Turns that are told apart, and kinds: of each turn the prompts that were new, and those mostly known.
TURNS = 5
KINDS = 2 * TURNS
#: Ages: below 16, then four an octave.
BUCKETS = 53
#: Uses and marks that are remembered.
USES = 1 << 14
MARKS = 1 << 17
#: Leaves between two times of learning.
LEARN_EVERY = 256
#: Touches within so many ticks of the clock are one use: a request matches, inserts and unlocks.
SAME_USE = 8
#: A mark hashes so many bytes before it.
MARK_BYTES = 32
#: A kind is believed to be like all others until it has had so many uses.
PRIOR_USES = 20
#: Nodes passed on the way from the last used to a leaf.
CLIMB = 8
#: 1 as a chance.
ONE = 1 << 20
#: The longest rest, in four times the age at which Recency evicts.
LONGEST_REST = 64
#: An age at which nothing is.
NEVER = 1 << 60
_MOST_CHANCE = ONE // 20 * 19
_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1

_Rows: TypeAlias = list[list[int]]


class Use(msgspec.Struct, gc=False):
    """A use of a node's pages. `again`: the time of their next use, which is number `next`; 0 if there was none."""

    clock: int
    pages: int
    turn: int
    kind: int
    again: int = 0
    next: int = 0


def bucket_of(age: int) -> int:
    """Returns the bucket of an age in ticks of the tree's clock."""
    if age < 16:
        return 0
    octave = age.bit_length() - 1
    return min(1 + (octave - 4) * 4 + (age >> (octave - 2) & 3), BUCKETS - 1)


def begin_of(bucket: int) -> int:
    """Returns the least age in a bucket."""
    octave, quarter = divmod(bucket - 1, 4)
    return (1 << octave + 4) + (quarter << octave + 2) if bucket else 0


def ranks_of(chance: list[int]) -> list[int]:
    """Returns the rank of each bucket from the chance of a use in it, in parts of `ONE`.

    A rank is the most uses for each tick, over all ends of the stay, times 2^32: a chance of 0.5 in [16, 20) alone
    gives a page of age 16 the rank 0.5 / (0.75 * 4) * 2^32.
    """
    ranks, widths = list[int](), [begin_of(at + 1) - begin_of(at) for at in range(BUCKETS - 1)]
    for first in range(BUCKETS):
        left, hits, spent, best = ONE, 0, 0, 0
        for at in range(first, BUCKETS - 1):
            gone = left * chance[at] >> 20
            hits += gone
            spent += (left - (gone >> 1)) * widths[at]
            left -= gone
            best = max(best, (hits << 32) // spent)
        ranks.append(best)
    return ranks


def mark_after(page: int) -> int:
    """Returns the next mark: every page up to 16, then 8 an octave."""
    step = 1
    while page + 1 >= 16 * step:
        step *= 2
    return (page // step + 1) * step


def mark_hash(data: bytes, page: int) -> int:
    """Returns the hash of the bytes before the end of `page`, 64 bits."""
    value = page * 0x9E3779B97F4A7C15 & _WORD
    for at in range(0, MARK_BYTES, 8):
        value = (value ^ int.from_bytes(data[at : at + 8], "little")) * 0xC2B2AE3D27D4EB4F & _WORD
        value ^= value >> 29
    return value


def _lived(ended: list[int], still: list[int]) -> list[tuple[int, int]]:
    """Returns for each bucket the pages used again in it, in parts of `ONE`, and those that reached it.

    Pages of that age that were not used again yet count half.
    """
    found, lived = list[tuple[int, int]](), 0
    for hit, waiting in zip(reversed(ended), reversed(still), strict=True):
        lived += hit + waiting
        found.append((hit << 20, lived - (waiting >> 1)))
    return found[::-1]


class ReuseHistory:
    """The last uses of nodes, resident or not, and the ranks learnt from them. The orders of a tree share one."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        #: The last tick seen, the number of the last use, and the leaves so far.
        self.now = self.count = self.births = 0
        #: Pages used again that were in the tree, and that were not; older ones count less.
        self.reused = self.missed = 0
        #: Pages that the tree holds, set by its owner before it evicts, and the age at which Recency would evict one.
        self.resident, self.reach = 0, NEVER
        #: Pages found that Recency would have evicted, and pages missed that it would have kept; older ones count less.
        self.won = self.lost = 0
        #: When the present trial of what was learnt began; the length of the next rest, and when the last one ends.
        self.trial, self.rest, self.rested = 0, 1, 0
        #: True while the order is that of Recency, since little is missed or it finds more.
        self.by_recency = 1
        self.ranks: _Rows = [[0] * BUCKETS for _ in range(KINDS)]
        self._uses = dict[int, Use]()
        #: By the low bits of the hash: its upper half, and the use.
        self._marks = dict[int, tuple[int, int]]()

    def use(self, number: int) -> Use | None:
        """Returns a use by number; None if it is forgotten."""
        return self._uses.get(number)

    def clock(self, node: Node) -> int:
        """Returns the tick of a node's last use, 0 if it is forgotten."""
        use = self._uses.get(node.use)
        return use.clock if use is not None else 0

    def kind(self, node: Node) -> int:
        """Returns the kind of a node's last use."""
        use = self._uses.get(node.use)
        return use.kind if use is not None else 0

    def rank(self, node: Node) -> int:
        """Returns the rank of a node now; 0 for one whose last use is forgotten."""
        use = self._uses.get(node.use)
        return self.ranks[use.kind][bucket_of(self.now - use.clock)] if use is not None else 0

    def note(self, node: Node) -> None:
        """Note that a node is used now. That ends the use before, and begins another of its kind."""
        self.now = max(self.now, node.used)
        use, pages = self._uses.get(node.use), node.end - node.start
        later = self._uses.get(use.next) if use is not None and use.again else None
        if use is not None and later is not None and later.clock == self.now:
            # The end of a node that was split came before.
            node.use = use.next
            later.pages += pages
            return
        if use is not None and use.clock == self.now:
            return
        if use is not None and not use.again and (node.locks or self.now - use.clock < SAME_USE):
            use.clock = self.now
            return
        number = self._open(pages, use.turn if use is not None else 1, use.kind if use is not None else 0)
        if use is not None and not use.again:
            self.won += pages if self.now - use.clock > self.reach else 0
            use.again, use.next = self.now, number
        self.reused += pages
        node.use = number

    def be_born(self, node: Node) -> None:
        """Note a new leaf: ask what is remembered of its pages, and mark them as its own."""
        self.now = max(self.now, node.used)
        parent = node.parent
        assert parent is not None
        known, before, number, page = node.start, 0, self.count + 1, mark_after(node.start)
        while page <= node.end:
            end = (page - node.start) * self.page_bytes
            if MARK_BYTES <= end <= len(node.tokens):
                value = mark_hash(node.tokens[end - MARK_BYTES : end], page)
                half, found = self._marks.get(value & (MARKS - 1), (0, 0))
                if half == value >> 32 and found in self._uses:
                    known, before = page, found
                self._marks[value & (MARKS - 1)] = value >> 32, number
            page = mark_after(page)
        use = self._uses.get(self._latest(before) if before else parent.use)
        turn = min(use.turn + 1, TURNS) if use is not None else 1
        if known > node.start:
            self.missed += known - node.start
            if use is not None and not use.again and self.now - use.clock >= SAME_USE:
                self.lost += known - node.start if self.now - use.clock < self.reach else 0
                use.again, use.next = self.now, number
        node.use = self._open(node.end - node.start, turn, (turn - 1) * 2 + (4 * known > 3 * node.end))
        self.births += 1
        if self.births % LEARN_EVERY == 0:
            self._learn()

    def join(self, node: Node, kind: int) -> bool:
        """Give a node just used the kind of the leaf that came below it. Returns False if it was not."""
        use = self._uses.get(node.use)
        if use is None or use.again or self.now - use.clock >= SAME_USE:
            return False
        use.kind = kind
        return True

    def _open(self, pages: int, turn: int, kind: int) -> int:
        self.count += 1
        self._uses.pop(self.count - USES, None)
        self._uses[self.count] = Use(self.now, pages, turn, kind)
        return self.count

    def _latest(self, number: int) -> int:
        """Returns the newest use, within 64, that took up the pages of a use."""
        for _ in range(64):
            use = self._uses[number]
            if not use.next or use.next not in self._uses:
                break
            number = use.next
        return number

    def _learn(self) -> None:
        ended, still = ([[0] * BUCKETS for _ in range(KINDS + 1)] for _ in range(2))
        pages = 0
        for use in self._uses.values():
            rows, bucket = (ended if use.again else still), bucket_of((use.again or self.now) - use.clock)
            rows[use.kind][bucket] += use.pages
            rows[KINDS][bucket] += use.pages
            pages += use.pages
        prior = PRIOR_USES * (pages // max(1, len(self._uses))) + 1
        alike = [hit // held if held else 0 for hit, held in _lived(ended[KINDS], still[KINDS])]
        for kind in range(KINDS):
            rows = zip(_lived(ended[kind], still[kind]), alike, strict=True)
            self.ranks[kind] = ranks_of(
                [min((hit + prior * all_) // (held + prior), _MOST_CHANCE) for (hit, held), all_ in rows]
            )
        self._judge()
        self.reused -= self.reused >> 3
        self.missed -= self.missed >> 3

    def _judge(self) -> None:
        """Decide whether the order is that of Recency until the next time of learning."""
        all_, tried = self.reused + self.missed, self.now - self.trial
        self.reach = self._reach()
        if self.by_recency:
            if self.now >= self.rested and 11 * self.missed > 2 * all_:
                self.by_recency, self.won, self.lost, self.trial = 0, 0, 0, self.now
        elif 25 * self.missed < 2 * all_:
            self.by_recency = 1
        elif tried >= self.reach and self.won < self.lost:
            self.rest = min(2 * self.rest, LONGEST_REST)
            self.by_recency, self.rested = 1, self.now + 4 * self.rest * self.reach
        elif tried >= 4 * self.reach:
            self.rest = max(1, self.rest // 2)
            self.won -= self.won >> 1
            self.lost -= self.lost >> 1
            self.trial += 2 * self.reach

    def _reach(self) -> int:
        """Returns the age at which Recency would evict a page."""
        pages = 0
        for number in range(self.count, max(0, self.count - USES), -1) if self.resident > 0 else ():
            use = self._uses[number]
            pages += 0 if use.again else use.pages
            if pages > self.resident:
                return self.now - use.clock
        return NEVER


class HazardOrder:
    """An order by smallest rank: see the module. O(kinds) to find the first, O(1) for all else.

    The nodes of a kind stand in order of use. A kind's rank rises with the age at first and falls in the end, so its
    smallest is that of the first or of the last.
    """

    def __init__(self, history: ReuseHistory, slot: int = 0) -> None:
        """Create an empty order. `slot`: 0 on the device, where only children on the device protect a node."""
        self.slot = slot
        self.history = history
        self._rings = [OrderedDict[Node, None]() for _ in range(KINDS)]
        self._ring_of = dict[Node, OrderedDict[Node, None]]()

    def add(self, node: Node) -> None:
        """See Order. A new leaf is noted, and those above it that were just used become of its kind."""
        if node in self._ring_of:
            return
        history = self.history
        history.now = max(history.now, node.used)
        is_new = not node.use and node.parent is not None
        if is_new:
            history.be_born(node)
        self._enter(node)
        above = node.parent if is_new else None
        while above is not None and above.parent is not None and history.join(above, history.kind(node)):
            if above in self._ring_of:
                self.discard(above)
                self._enter(above)
            above = above.parent

    def discard(self, node: Node) -> None:
        """See Order. O(1)."""
        ring = self._ring_of.pop(node, None)
        if ring is not None:
            del ring[node]

    def touch(self, path: Iterable[Node]) -> None:
        """See Order. Notes nodes outside the order too."""
        for node in path:
            self.history.note(node)
            if node in self._ring_of:
                self.discard(node)
                self._enter(node)

    def front(self, node: Node) -> None:
        """Put a node where its last use stands."""
        if node not in self._ring_of:
            self.add(node)
            return
        self.discard(node)
        self._enter(node)

    def first(self) -> Node | None:
        """Returns the next victim; None if empty."""
        history, found, least, when = self.history, None, 0, 0
        for ring in self._rings:
            if not ring:
                continue
            node = next(iter(ring))
            clock = history.clock(node)
            rank = node.used if history.by_recency else history.rank(node)
            if found is None or (rank, clock) < (least, when):
                found, least, when = node, rank, clock
            last = None if history.by_recency else self._last_leaf(ring)
            if last is not None and (rank := history.rank(last)) < least:
                found, least, when = last, rank, history.clock(last)
        return found

    def _last_leaf(self, ring: OrderedDict[Node, None]) -> Node | None:
        for passed, node in enumerate(reversed(ring)):
            if not (node.device_children if self.slot == 0 else node.children):
                return node
            if passed == CLIMB:
                break
        return None

    def _enter(self, node: Node) -> None:
        """Put a node last of its kind, or first if it was used before the first, as one that comes back was."""
        history = self.history
        ring = self._ring_of[node] = self._rings[history.kind(node)]
        clock = history.clock(node)
        early = ring and history.clock(next(iter(ring))) >= clock < history.clock(next(reversed(ring)))
        ring[node] = None
        if early:
            ring.move_to_end(node, last=False)

    def __iter__(self) -> Iterator[Node]:
        for ring in self._rings:
            yield from ring

    def __contains__(self, node: Node) -> bool:
        return node in self._ring_of

    def __len__(self) -> int:
        return len(self._ring_of)
