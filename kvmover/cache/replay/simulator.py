"""A simulated engine serves one request after the other from a prefix tree, its tiers and a ledger.

A request is matched with its last token left out, so that at least that one is computed. Its pages are in the tree when
its prefill is done, which is before the next request comes; pages that it extends are locked meanwhile. Its output is
not cached: traces do not say which tokens it was, and the next turn of a chat brings it back in its prompt. Copies take
no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvmover.cache.ledger import Credit, Ledger, Loss, Residency
from kvmover.cache.prefix import (
    FULL,
    ActionList,
    CopyOut,
    FreePages,
    InvariantBroken,
    Match,
    PrefixTree,
    RadixKey,
    Tier,
    WriteBack,
    WriteThrough,
)
from kvmover.cache.replay.config import ReplayConfig, ReplayConfigError
from kvmover.cache.replay.report import Report
from kvmover.cache.replay.trace_reader import ReplayRequest
from kvmover.errors import KvmoverError

PageArray = npt.NDArray[np.int32]
PageNumbers = npt.NDArray[np.int64]


class Ideal:
    """Remembers of every block, after the blocks before it, how many of its first tokens were ever computed."""

    def __init__(self) -> None:
        #: Numbers of places: a block after the place before it; one that is followed when it is cut short has another.
        self._places = dict[tuple[int, int], int]()
        self._known = list[int]()

    def serve(self, request: ReplayRequest) -> tuple[int, list[int]]:
        """Tokens at the beginning of this prompt that an earlier one began with; then this prompt is known too.

        With it the place of each block: equal for two prompts where all tokens up to there are.
        """
        known, full, found = self._known, request.block_tokens, list[int]()
        before, reused, whole, place_of = -1, 0, True, self._places.setdefault
        for block, wanted in zip(request.hash_ids, request.lengths(), strict=True):
            fresh = len(known)
            place = place_of((before, block), fresh)
            found.append(place)
            if place == fresh:
                known.append(wanted)
                whole = False
            else:
                have = known[place]
                if whole:
                    reused += min(have, wanted)
                    whole = have >= wanted
                if have < wanted:
                    known[place] = wanted
            before = place
            if wanted < full:
                before = place_of((place, -wanted), len(known))
                if before == len(known):
                    known.append(0)
        return reused, found


def page_numbers(request: ReplayRequest, places: Sequence[int], page_tokens: int) -> PageNumbers:
    """A number for each whole page of a prompt, equal where all tokens up to the page's end are.

    It is of the place of the block that the page ends in, and of the how many'th page that is there.
    """
    most, rest = divmod(request.block_tokens, page_tokens)
    firsts = np.array(places) * (most + (rest > 0))
    if not rest and not request.block_lengths:
        return (firsts[:, None] + np.arange(most)).reshape(-1)[: request.input_length // page_tokens]
    ends = np.arange(page_tokens, request.input_length + 1, page_tokens)
    begins = np.cumsum([0, *request.lengths()[:-1]])
    blocks = np.searchsorted(begins, ends, "left") - 1
    return firsts[blocks] + (ends - begins[blocks] - 1) // page_tokens


def in_pages(tokens: int, page_tokens: int) -> int:
    """Tokens of the whole pages among the first `tokens`."""
    return tokens - tokens % page_tokens


class PagesExhausted(KvmoverError):
    """More pages were asked for than are free: the message has both numbers."""


class SimulatedPages:
    """Free page ids of a tier of `limit` pages, or of one without end. The last one given back is the next one out."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._stack = np.empty(1024, np.int32)
        self._top = 0
        self._fresh = 0

    @property
    def taken(self) -> int:
        """Ids that are out."""
        return self._fresh - self._top

    def short(self, pages: int) -> int:
        """How many of `pages` are not free; never below 0."""
        return max(0, self.taken + pages - self.limit) if self.limit is not None else 0

    def take(self, pages: int) -> PageArray:
        """`pages` ids, which are the caller's until they are given back."""
        if self.short(pages):
            raise PagesExhausted(f"{pages} pages asked for, {self.taken} of {self.limit} are taken")
        again = min(pages, self._top)
        self._top -= again
        fresh, self._fresh = self._fresh, self._fresh + pages - again
        ids = self._stack[self._top : self._top + again]
        if again == pages:
            return ids.copy()
        return np.concatenate([ids, np.arange(fresh, self._fresh, dtype=np.int32)])

    def give(self, ids: PageArray) -> None:
        """Ids come back, whoever had them; nothing is checked."""
        top = self._top + len(ids)
        if top > len(self._stack):
            self._stack = np.concatenate([self._stack, np.empty(top, np.int32)])
        self._stack[self._top : top] = ids
        self._top = top


class SimulatedStorage:
    """Up to `limit` pages, by number. Nothing takes time, and no page is ever bad.

    Uses are written down one after the other, and of each page where its last use stands: a page is here while that is
    in the log, and what stands first there is what was used least recently.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._log = np.empty(1 << 16, np.int64)
        self._head = self._tail = 0
        self._used = np.full(1 << 16, -1)
        self._pages = 0

    def __len__(self) -> int:
        return self._pages

    def leading(self, pages: PageNumbers) -> int:
        """How many of `pages` are here, up to the first that is not. They count as read."""
        missing = np.flatnonzero(self._places(pages) < 0)
        count = int(missing[0]) if len(missing) else len(pages)
        if count:
            self._touch(pages[:count])
        return count

    def put(self, pages: PageNumbers) -> None:
        """Keep `pages`; the least recently used go when there is no room."""
        self._pages += int(np.count_nonzero(self._places(pages) < 0))
        self._touch(pages)
        while self._pages > self.limit:
            self._drop(self._pages - self.limit)

    def _places(self, pages: PageNumbers) -> PageNumbers:
        """Where the last use of each stands in the log; -1 for one that is not here."""
        try:
            return self._used[pages]
        except IndexError:
            self._used = np.concatenate([self._used, np.full(int(pages.max()) + 1, -1)])
            return self._used[pages]

    def _touch(self, pages: PageNumbers) -> None:
        """Deepest first, so that a prefix always outlives what follows it."""
        if self._tail + len(pages) > len(self._log):
            self._shorten(len(pages))
        before, self._tail = self._tail, self._tail + len(pages)
        self._log[before : self._tail] = pages[::-1]
        self._used[pages] = np.arange(self._tail - 1, before - 1, -1)

    def _drop(self, most: int) -> None:
        """Up to `most` pages, the least recently used of those whose uses stand first."""
        places = np.arange(self._head, min(self._head + 2 * most, self._tail))
        pages = self._log[places]
        last = np.flatnonzero(self._used[pages] == places)[:most]
        self._used[pages[last]] = -1
        self._pages -= len(last)
        self._head = int(places[last[-1]] if len(last) == most else places[-1]) + 1

    def _shorten(self, room: int) -> None:
        """Leave last uses alone in the log, and as many places again."""
        places = np.arange(self._head, self._tail)
        pages = self._log[places]
        pages = pages[self._used[pages] == places]
        self._log = np.empty(max(len(self._log), 2 * (len(pages) + room)), np.int64)
        self._log[: len(pages)] = pages
        self._used[pages] = np.arange(len(pages))
        self._head, self._tail = 0, len(pages)


_NO_PAGES = np.empty(0, np.int64)

#: One page in so many is followed from storing to removal.
RESIDENCY_SAMPLE = 61


class ReplayPrompt(NamedTuple):
    """A request's prompt by its whole pages, of which at most `limit` can be hits."""

    pages: PageNumbers
    key: RadixKey
    limit: int
    now_s: float


class Server:
    """Raises ReplayConfigError for a prompt that the device cannot hold, and InvariantBroken when pages are missing
    that nobody gave up. `ledger` has the accounts, strict ones.

    A page's number stands for all tokens up to its end: the tree and storage compare it instead of them.
    """

    def __init__(self, config: ReplayConfig, ledger: Ledger | None = None) -> None:
        self.config = config
        self.ledger = ledger or Ledger()
        self.tree = PrefixTree(1, policy=config.policy, tiers=config.tiers)
        self.device = SimulatedPages(None if config.device_tokens is None else config.pages(config.device_tokens))
        self.host = SimulatedPages(config.pages(config.host_tokens))
        self.storage = SimulatedStorage(config.pages(config.storage_tokens)) if config.storage_tokens else None
        self.residency = Residency()
        #: Device pages that the tree gave up for room, over all requests.
        self.evicted_pages = 0
        #: Of each page on the device its number, by which it is written to storage when it is given up.
        self._numbers = np.zeros(self.device.limit or 0, np.int64)
        self._ideal = Ideal()
        self._served = 0

    def serve(self, request: ReplayRequest) -> None:
        """Match, fetch and load what slower tiers have, make room, compute, insert."""
        number, self._served = self._served, self._served + 1
        page_tokens, now_s, length = self.config.page_tokens, request.arrived_s, request.input_length
        needed = -(-length // page_tokens)
        if self.device.limit is not None and needed > self.device.limit:
            raise ReplayConfigError(
                f"a device of {self.config.device_tokens} tokens cannot hold the prompt of {length} of request {number}"
            )
        reusable, places = self._ideal.serve(request)
        pages = page_numbers(request, places, page_tokens)
        prompt = ReplayPrompt(pages, self.tree.key(pages), (length - 1) // page_tokens, now_s)
        match = self.tree.match(prompt.key, limit_tokens=prompt.limit)
        self.ledger.matched(number, length, reusable, now_s)
        credit, lost = Credit(match.tokens * page_tokens), dict[Loss, int]()
        if self.config.host_tokens:
            match, credit, lost = self._bring(prompt, match)
        known = match.tokens
        self.residency.used(_sample(match.page_ids), now_s)
        self.ledger.admitted(number, credit, self._losses(request, reusable, known * page_tokens, lost))

        handle = self.tree.lock(match.device_node)
        ids = self._room(needed - known, now_s)
        computed = ids[: len(pages) - known]
        self._name(computed, pages[known:])
        inserted = self.tree.insert(prompt.key, computed, first_page=known)
        self.tree.unlock(handle)
        self._free(inserted, now_s)
        self.device.give(ids[len(computed) :])
        self.residency.stored(_sample(computed), now_s)
        self.ledger.computed(number, length - known * page_tokens)
        self.ledger.finished(number, now_s)
        for node in inserted.backups:
            self._back_up(node, prompt)

    def _losses(self, request: ReplayRequest, reusable: int, credited: int, lost: dict[Loss, int]) -> dict[Loss, int]:
        """Every reusable token that is not credited has a reason. What no other explains was evicted for room."""
        whole = in_pages(reusable, self.config.page_tokens)
        usable = in_pages(min(reusable, request.input_length - 1), self.config.page_tokens)
        evicted = usable - credited - sum(lost.values())
        if evicted and not self.evicted_pages:
            raise InvariantBroken(f"{evicted} tokens are not in the tree, which never gave up a page")
        reasons = {
            Loss.PARTIAL_PAGE: reusable - whole,
            Loss.LAST_TOKEN: whole - usable,
            **lost,
            Loss.CAPACITY_EVICTED: evicted,
        }
        return {reason: tokens for reason, tokens in reasons.items() if tokens}

    # Room

    def _room(self, pages: int, now_s: float) -> PageArray:
        """`pages` free pages of the device, of which the tree gives up what is short."""
        while short := self.device.short(pages):
            given_up = self._evicted(short, now_s)
            self.evicted_pages += len(given_up.page_ids())
            self._free(given_up, now_s)
        return self.device.take(pages)

    def _evicted(self, pages: int, now_s: float) -> ActionList:
        """What the tree does to give up `pages` pages of the device, or as many of them as the host can take at once.

        Where they go there, they go on to storage.
        """
        if not isinstance(self.config.tiers, WriteBack) or self.host.limit is None:
            return self.tree.evict(pages)
        room = self.host.take(self._host_room(min(pages, self.host.limit), now_s))
        given_up = self.tree.evict(min(pages, len(room)) or pages, room=room)
        copies = [action.legs[0] for action in given_up.actions if isinstance(action, CopyOut)]
        self.host.give(room[sum(len(leg.dst_page_ids) for leg in copies) :])
        if self.storage is not None and copies:
            self.storage.put(self._numbers[np.concatenate([leg.src_page_ids for leg in reversed(copies)])])
        return given_up

    def _host_room(self, pages: int, now_s: float) -> int:
        """As many of `pages` as the host has free after the tree gave up what it may."""
        if short := self.host.short(pages):
            self._free(self.tree.evict_host(short), now_s)
        return pages - self.host.short(pages)

    def _free(self, outcome: ActionList, now_s: float) -> None:
        for action in outcome.actions:
            if not isinstance(action, FreePages):
                continue
            if action.tier is Tier.HOST:
                self.host.give(action.page_ids)
            else:
                self.residency.removed(_sample(action.page_ids), now_s)
                self.device.give(action.page_ids)

    def _name(self, ids: PageArray, pages: PageNumbers) -> None:
        """Remember what storage will call pages that came to the device."""
        if self.storage is not None and self.device.limit is not None:
            self._numbers[ids] = pages[: len(ids)]

    # Tiers

    def _bring(self, prompt: ReplayPrompt, match: Match) -> tuple[Match, Credit, dict[Loss, int]]:
        """Bring to the device what slower tiers have. Returned is the match with it, and which tier gave how much."""
        before, page_tokens, missing, more = match, self.config.page_tokens, 0, self.storage is not None
        while more and match.best_tokens < prompt.limit:
            came = match.best_tokens
            match, missing = self._fetch(prompt, match)
            more = missing > 0 and match.best_tokens > came
            match = self._load(prompt, match)
        match = self._load(prompt, match)
        pages = before.tokens, before.best_tokens - before.tokens, match.tokens - before.best_tokens
        lost = {Loss.HOST_CAPACITY: missing * page_tokens} if missing else {}
        return match, Credit(*(count * page_tokens for count in pages)), lost

    def _fetch(self, prompt: ReplayPrompt, match: Match) -> tuple[Match, int]:
        """Read into host pages what storage has beyond the best match. With it how many pages have no room there."""
        assert self.storage is not None
        tree, first, through = self.tree, match.best_tokens, isinstance(self.config.tiers, WriteThrough)
        beyond = self.storage.leading(prompt.pages[first : prompt.limit])
        if not beyond:
            return match, 0
        if through and not self._back_up(match.best_node, prompt):
            return match, beyond
        on_host = through or match.best_tokens > match.tokens
        handles = [tree.lock(match.device_node), *([tree.lock_host(match.best_node)] if on_host else [])]
        # What the device gives up goes by the host, and so before this comes there.
        if not through:
            self.device.give(self._room(min(beyond, self.host.limit or 0) + first - match.tokens, prompt.now_s))
        able = self._host_room(beyond, prompt.now_s)
        if able:
            part = tree.key(prompt.pages[: first + able])
            self._free(tree.end(tree.begin_fetch(part, first, self.host.take(able))), prompt.now_s)
        for handle in handles:
            tree.unlock(handle)
        return tree.match(prompt.key, limit_tokens=prompt.limit), beyond - able

    def _load(self, prompt: ReplayPrompt, match: Match) -> Match:
        """Copy to the device what the host has of the best match."""
        if match.best_tokens == match.tokens:
            return match
        tree = self.tree
        handles = tree.lock(match.device_node), tree.lock_host(match.best_node)
        ids = self._room(match.best_tokens - match.tokens, prompt.now_s)
        load = tree.begin_load(match.best_node, {FULL: ids})
        self._free(tree.end(load.op), prompt.now_s)
        for handle in handles:
            tree.unlock(handle)
        self._name(ids, prompt.pages[match.tokens :])
        self.residency.stored(_sample(ids), prompt.now_s)
        return tree.match(prompt.key, limit_tokens=prompt.limit)

    def _back_up(self, node: int, prompt: ReplayPrompt) -> bool:
        """Copy to the host, and to storage, what the path has on the device alone. False when the host has no room."""
        needs = self.tree.backup_needs(node).get(FULL, 0)
        if not needs:
            return True
        if self._host_room(needs, prompt.now_s) < needs:
            return False
        copy = self.tree.begin_backup(node, {FULL: self.host.take(needs)})
        self._free(self.tree.end(copy.op), prompt.now_s)
        if self.storage is not None:
            self.storage.put(prompt.pages[copy.legs[0].positions])
        return True


def _sample(ids: PageArray) -> list[int]:
    return ids[ids % RESIDENCY_SAMPLE == 0].tolist()


class Requests(Protocol):
    """A trace, or a list of requests: read once for every replay, and never held as a whole."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ReplayRequest]: ...


def replay(requests: Requests, config: ReplayConfig, step: Callable[[int], object] = int) -> Report:
    """Serve `requests` in order; `step` gets how many more are done. Raises ReplayConfigError for an impossible one."""
    server = Server(config)
    began = time.perf_counter()
    every = max(1, len(requests) // 200)
    for number, request in enumerate(requests, start=1):
        server.serve(request)
        if number % every == 0:
            step(every)
    seconds = time.perf_counter() - began
    step(len(requests) % every)
    return Report(config, len(requests), server.ledger.total().first, seconds, server.residency)
