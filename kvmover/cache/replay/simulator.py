"""A simulated engine serves one request after the other from a prefix tree, its tiers and a ledger.

A request is matched with its last token left out, so that at least that one is computed. Its pages are in the tree when
its prefill is done, which is before the next request comes; pages that it extends are locked meanwhile. Its output is
not cached: traces do not say which tokens it was, and the next turn of a chat brings it back in its prompt. Copies take
no time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmover.cache.ledger import Credit, Ledger, Loss, Residency
from kvmover.cache.prefix import FULL, ActionList, InvariantBroken, Match, PrefixTree, RadixKey, Tier
from kvmover.cache.replay.config import ReplayConfig, ReplayConfigError
from kvmover.cache.replay.report import Report
from kvmover.cache.replay.trace_reader import ReplayRequest
from kvmover.errors import KvmoverError


class Ideal:
    """Remembers of every block, after the blocks before it, how many of its first tokens were ever computed."""

    def __init__(self) -> None:
        #: Numbers of places: a block after the place before it; one that is followed when it is cut short has another.
        self._places = dict[tuple[int, int], int]()
        self._known = list[int]()

    def serve(self, request: ReplayRequest) -> int:
        """Tokens at the beginning of this prompt that an earlier one began with; then this prompt is known too."""
        places, known, full = self._places, self._known, request.block_tokens
        before, reused, whole = -1, 0, True
        for block, wanted in zip(request.hash_ids, request.lengths(), strict=True):
            place = places.setdefault((before, block), len(known))
            if place == len(known):
                known.append(0)
            have = known[place]
            if whole:
                reused += min(have, wanted)
                whole = have >= wanted
            if have < wanted:
                known[place] = wanted
            before = place
            if wanted < full:
                before = places.setdefault((place, -wanted), len(known))
                if before == len(known):
                    known.append(0)
        return reused


def in_pages(tokens: int, page_tokens: int) -> int:
    """Tokens of the whole pages among the first `tokens`."""
    return tokens - tokens % page_tokens


PageArray = npt.NDArray[np.int32]


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
    """Up to `limit` pages. Nothing takes time, and no page is ever bad."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pages = OrderedDict[bytes, None]()

    def __len__(self) -> int:
        return len(self._pages)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes` are here, up to the first that is not. They count as read."""
        count = 0
        for page in hashes:
            if page not in self._pages:
                break
            count += 1
        self._touch(hashes[:count])
        return count

    def put(self, hashes: Sequence[bytes]) -> None:
        """Keep pages by hash; the least recently used go when there is no room."""
        self._touch(hashes)
        while len(self._pages) > self.limit:
            self._pages.popitem(last=False)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Deepest first, so that a prefix always outlives what follows it."""
        pages = self._pages
        move = pages.move_to_end
        for page in reversed(hashes):
            if page in pages:
                move(page)
            else:
                pages[page] = None


#: One page in so many is followed from storing to removal.
RESIDENCY_SAMPLE = 61


class Server:
    """Raises ReplayConfigError for a prompt that the device cannot hold, and InvariantBroken when pages are missing
    that nobody gave up. `ledger` has the accounts, strict ones.
    """

    def __init__(self, config: ReplayConfig, ledger: Ledger | None = None) -> None:
        self.config = config
        self.ledger = ledger or Ledger()
        self.tree = PrefixTree(config.page_tokens, policy=config.policy, tiers=config.tiers)
        self.device = SimulatedPages(None if config.device_tokens is None else config.pages(config.device_tokens))
        self.host = SimulatedPages(config.pages(config.host_tokens))
        self.storage = SimulatedStorage(config.pages(config.storage_tokens)) if config.storage_tokens else None
        self.residency = Residency()
        #: Device pages that the tree gave up for room, over all requests.
        self.evicted_pages = 0
        self._ideal = Ideal()
        self._served = 0

    def serve(self, request: ReplayRequest) -> None:
        """Match, fetch and load what slower tiers have, make room, compute, insert."""
        number, self._served = self._served, self._served + 1
        page_tokens, now_s = self.config.page_tokens, request.arrived_s
        tokens = request.tokens()
        needed = -(-request.input_length // page_tokens)
        if self.device.limit is not None and needed > self.device.limit:
            raise ReplayConfigError(
                f"a device of {self.config.device_tokens} tokens cannot hold the prompt of {request.input_length}"
                f" of request {number}"
            )
        key = self.tree.key(tokens)
        match = self.tree.match(key, limit_tokens=request.input_length - 1)
        reusable = self._ideal.serve(request)
        self.ledger.matched(number, request.input_length, reusable, now_s)
        credit, lost = Credit(match.tokens), dict[Loss, int]()
        if self.config.host_tokens:
            match, credit, lost = self._bring(key, match, request.input_length - 1, now_s)
        self.residency.used(_sample(match.page_ids), now_s)
        self.ledger.admitted(number, credit, self._losses(request, reusable, match.tokens, lost))

        handle = self.tree.lock(match.device_node)
        first_page = match.tokens // page_tokens
        ids = self._room(needed - first_page, now_s)
        whole = request.input_length // page_tokens - first_page
        inserted = self.tree.insert(key, ids[:whole], first_page=first_page)
        self.tree.unlock(handle)
        self._free(inserted, now_s)
        self.device.give(ids[whole:])
        self.residency.stored(_sample(ids[:whole]), now_s)
        self.ledger.computed(number, request.input_length - match.tokens)
        self.ledger.finished(number, now_s)
        for node in inserted.backups:
            self._back_up(node, now_s)

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

    def _room(self, pages: int, now_s: float) -> PageArray:
        """`pages` free pages of the device, of which the tree gives up what is short."""
        if short := self.device.short(pages):
            given_up = self.tree.evict(short)
            self.evicted_pages += len(given_up.page_ids())
            self._free(given_up, now_s)
        return self.device.take(pages)

    def _host_room(self, pages: int, now_s: float) -> int:
        """As many of `pages` as the host has free after the tree gave up what it may."""
        if short := self.host.short(pages):
            self._free(self.tree.evict_host(short), now_s)
        return pages - self.host.short(pages)

    def _free(self, outcome: ActionList, now_s: float) -> None:
        if len(freed := outcome.page_ids()):
            self.residency.removed(_sample(freed), now_s)
            self.device.give(freed)
        if self.config.host_tokens:
            self.host.give(outcome.page_ids(tier=Tier.HOST))

    def _bring(
        self, key: RadixKey, match: Match, limit_tokens: int, now_s: float
    ) -> tuple[Match, Credit, dict[Loss, int]]:
        """Bring to the device what slower tiers have. Returned is the match with it, and which tier gave how much."""
        before, lost = match, dict[Loss, int]()
        if self.storage is not None:
            match, lost = self._fetch(self.storage, key, match, limit_tokens, now_s)
        match = self._load(key, match, limit_tokens, now_s)
        host_tokens = before.best_tokens - before.tokens
        return match, Credit(before.tokens, host_tokens, match.tokens - before.best_tokens), lost

    def _fetch(
        self, storage: SimulatedStorage, key: RadixKey, match: Match, limit_tokens: int, now_s: float
    ) -> tuple[Match, dict[Loss, int]]:
        """Read into host pages what storage has beyond the best match."""
        page_tokens = self.config.page_tokens
        words = memoryview(key.data).cast("I")
        first = match.best_tokens // page_tokens
        found = storage.leading(key.page_hashes(page_tokens)[: limit_tokens // page_tokens])
        if found <= first:
            return match, {}
        if not self._back_up(match.best_node, now_s):
            return match, {Loss.HOST_CAPACITY: (found - first) * page_tokens}
        handle = self.tree.lock_host(match.best_node)
        able = self._host_room(found - first, now_s)
        if able:
            part = self.tree.key(words[: (first + able) * page_tokens])
            op = self.tree.begin_fetch(part, first, self.host.take(able))
            self._free(self.tree.end(op), now_s)
        self.tree.unlock(handle)
        lost = (found - first - able) * page_tokens
        return self.tree.match(key, limit_tokens=limit_tokens), {Loss.HOST_CAPACITY: lost}

    def _load(self, key: RadixKey, match: Match, limit_tokens: int, now_s: float) -> Match:
        """Copy to the device what the host has of the best match."""
        if match.best_tokens == match.tokens:
            return match
        handles = self.tree.lock(match.device_node), self.tree.lock_host(match.best_node)
        ids = self._room(self.tree.load_needs(match.best_node)[FULL], now_s)
        self._free(self.tree.end(self.tree.begin_load(match.best_node, {FULL: ids}).op), now_s)
        for handle in handles:
            self.tree.unlock(handle)
        self.residency.stored(_sample(ids), now_s)
        return self.tree.match(key, limit_tokens=limit_tokens)

    def _back_up(self, node: int, now_s: float) -> bool:
        """Copy to the host, and to storage, what the path has on the device alone. False when the host has no room."""
        needs = self.tree.backup_needs(node).get(FULL, 0)
        if not needs:
            return True
        if self._host_room(needs, now_s) < needs:
            return False
        transfer = self.tree.begin_backup(node, {FULL: self.host.take(needs)})
        self._free(self.tree.end(transfer.op), now_s)
        if self.storage is not None:
            store = self.tree.begin_store(node, transfer.first_page)
            self.storage.put(store.hashes)
            self.tree.end(store.op)
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
