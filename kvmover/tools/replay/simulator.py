"""A simulated engine serves one request after the other from a prefix tree, its tiers and a ledger.

A request is matched without its last token, so that at least that token is computed. Its pages enter the tree when its
prefill is done, before the next request comes; pages that it extends are locked meanwhile. Its output is not cached:
traces do not give its tokens, and the next turn of a chat repeats it in its prompt. Copies take no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeAlias

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
)
from kvmover.tools.replay.ideal import new_ideal
from kvmover.tools.replay.replay_config import ReplayConfig, ReplayConfigError
from kvmover.tools.replay.replay_report import Report
from kvmover.tools.replay.simulated_tiers import (
    PageIdSeries,
    PageNumbers,
    SimulatedPages,
    multiples,
    new_storage,
)
from kvmover.tools.replay.trace_reader import ReplayRequest

Losses: TypeAlias = Mapping[Loss, int]

#: One page in this many is followed from storing to removal.
RESIDENCY_SAMPLE = 61


def in_pages(tokens: int, page_tokens: int) -> int:
    """Returns the tokens of the whole pages among the first `tokens`."""
    return tokens - tokens % page_tokens


class ReplayPrompt(NamedTuple):
    """A request's prompt by its whole pages, of which at most `limit` can be hits."""

    pages: PageNumbers
    key: RadixKey
    limit: int
    now_s: float


class Server:
    """A simulated engine with its tiers. `ledger` has the accounts, strict ones.

    Raises ReplayConfigError for a prompt larger than the device, and InvariantBroken for pages missing without
    eviction.

    A page's number stands for all tokens up to its end: the tree and storage compare it instead of tokens, and it is
    the page's id on the device, where no page is twice.
    """

    def __init__(self, config: ReplayConfig, ledger: Ledger | None = None) -> None:
        self.config = config
        self.ledger = ledger or Ledger()
        self.tree = PrefixTree(1, policy=config.policy, tiers=config.tiers)
        self.device = SimulatedPages(None if config.device_tokens is None else config.pages(config.device_tokens))
        self.host = SimulatedPages(config.pages(config.host_tokens))
        self.storage = new_storage(config.pages(config.storage_tokens)) if config.storage_tokens else None
        self.residency = Residency()
        #: Device pages evicted by the tree for room, over all requests.
        self.evicted_pages = 0
        self._host_ids = PageIdSeries()
        self._writes_back = isinstance(config.tiers, WriteBack)
        self._ideal = new_ideal()
        self._served = 0

    def serve(self, request: ReplayRequest) -> Credit:
        """Match, fetch and load from slower tiers, make room, compute, insert. Returns the tokens by tier."""
        number, self._served = self._served, self._served + 1
        page_tokens, now_s, length = self.config.page_tokens, request.arrived_s, request.input_length
        needed = -(-length // page_tokens)
        if self.device.limit is not None and needed > self.device.limit:
            raise ReplayConfigError(
                f"a device of {self.config.device_tokens} tokens cannot hold the prompt of {length} of request {number}"
            )
        reusable, row = self._ideal.serve(request.hash_ids, request.lengths(), request.block_tokens, page_tokens)
        pages = np.frombuffer(row, np.int64)
        prompt = ReplayPrompt(pages, self.tree.key(pages), (length - 1) // page_tokens, now_s)
        match = self.tree.match(prompt.key, limit_tokens=prompt.limit)
        self.ledger.matched(number, length, reusable, now_s)
        if self.config.host_tokens:
            match, credit, lost = self._bring(prompt, match)
        else:
            credit, lost = Credit(match.tokens * page_tokens), dict[Loss, int]()
        known = match.tokens
        self.residency.used(_sample(pages[:known]), now_s)
        self.ledger.admitted(number, credit, self._losses(request, reusable, known * page_tokens, lost))

        handle, computed = self.tree.lock(match.device_node), pages[known:]
        self._make_room(needed - known, now_s)
        self.device.take(needed - known)
        new = len(computed) - self._has_last_page(prompt)
        inserted = self.tree.insert(prompt.key, computed, first_page=known)
        self.tree.unlock(handle)
        self.device.give(needed - known - new)
        self.residency.stored(_sample(computed[:new]), now_s)
        self.ledger.computed(number, length - known * page_tokens)
        self.ledger.finished(number, now_s)
        for node in inserted.backups:
            self._back_up(node, prompt)
        return credit

    def _has_last_page(self, prompt: ReplayPrompt) -> bool:
        """True if a page on the device is computed again for the logits of its last token; that copy is freed."""
        return len(prompt.pages) > prompt.limit and self.tree.look(prompt.key).tokens == len(prompt.pages)

    def _losses(self, request: ReplayRequest, reusable: int, credited: int, lost: Losses) -> Losses:
        """Returns `lost` with a reason for every reusable token not credited; the remainder was evicted.

        Raises InvariantBroken if there is a remainder without any eviction.
        """
        whole = in_pages(reusable, self.config.page_tokens)
        usable = in_pages(min(reusable, request.input_length - 1), self.config.page_tokens)
        evicted = usable - credited - sum(lost.values())
        if evicted and not self.evicted_pages:
            raise InvariantBroken(f"{evicted} tokens are not in the tree, which never gave up a page")
        if reusable == credited:
            return lost
        reasons = {Loss.PARTIAL_PAGE: reusable - whole, Loss.LAST_TOKEN: whole - usable, Loss.CAPACITY_EVICTED: evicted}
        return {**lost, **{reason: tokens for reason, tokens in reasons.items() if tokens}}

    # Room

    def _make_room(self, pages: int, now_s: float) -> None:
        """Free `pages` device pages by evicting the shortfall from the tree."""
        while short := self.device.short(pages):
            given_up = self._evicted(short, now_s)
            self.evicted_pages += len(given_up.page_ids())
            self._free(given_up, now_s)

    def _evicted(self, pages: int, now_s: float) -> ActionList:
        """Evict `pages` device pages from the tree, or as many as the host can take at once.

        With write-back they go to the host, and on to storage.
        """
        if not self._writes_back or self.host.limit is None:
            return self.tree.evict(pages)
        able = self._host_room(min(pages, self.host.limit), now_s)
        given_up = self.tree.evict(min(pages, able) or pages, room=self._host_ids.take(able))
        rows = [action.legs[0].src_page_ids for action in given_up.actions if isinstance(action, CopyOut)]
        if rows:
            gone = _numbers(np.concatenate(rows[::-1]) if len(rows) > 1 else rows[0])
            self.host.take(len(gone))
            if self.storage is not None:
                self.storage.put(gone)
        return given_up

    def _host_room(self, pages: int, now_s: float) -> int:
        """Returns how many of `pages` the host has free after evicting."""
        short = self.host.short(pages)
        if short:
            self._free(self.tree.evict_host(short), now_s)
            short = self.host.short(pages)
        return pages - short

    def _free(self, outcome: ActionList, now_s: float) -> None:
        for action in outcome.actions:
            if not isinstance(action, FreePages):
                continue
            if action.tier is Tier.HOST:
                self.host.give(len(action.page_ids))
            else:
                self.residency.removed(_sample(_numbers(action.page_ids)), now_s)
                self.device.give(len(action.page_ids))

    # Tiers

    def _bring(self, prompt: ReplayPrompt, match: Match) -> tuple[Match, Credit, Losses]:
        """Bring pages from slower tiers to the device. Returns the new match, the credit by tier, and the losses."""
        before, page_tokens, missing, more = match, self.config.page_tokens, 0, self.storage is not None
        while more and match.best_tokens < prompt.limit:
            came = match.best_tokens
            match, missing = self._fetch(prompt, match)
            more = missing > 0 and match.best_tokens > came
            match = self._load(prompt, match)
        match = self._load(prompt, match)
        device, best = before.tokens * page_tokens, before.best_tokens * page_tokens
        lost = {Loss.HOST_CAPACITY: missing * page_tokens} if missing else {}
        return match, Credit(device, best - device, match.tokens * page_tokens - best), lost

    def _fetch(self, prompt: ReplayPrompt, match: Match) -> tuple[Match, int]:
        """Read into host pages the pages storage has beyond the best match.

        Returns the match and the pages without room.
        """
        assert self.storage is not None
        tree, first, through = self.tree, match.best_tokens, not self._writes_back
        beyond = self.storage.leading(prompt.pages[first : prompt.limit])
        if not beyond:
            return match, 0
        if through and not self._back_up(match.best_node, prompt):
            return match, beyond
        on_host = through or match.best_tokens > match.tokens
        handles = [tree.lock(match.device_node), *([tree.lock_host(match.best_node)] if on_host else [])]
        # evicted device pages go to the host, so they precede the fetch
        if not through:
            self._make_room(min(beyond, self.host.limit or 0) + first - match.tokens, prompt.now_s)
        able = self._host_room(beyond, prompt.now_s)
        if able:
            part = tree.key(prompt.pages[: first + able])
            self.host.take(able)
            self._free(tree.end(tree.begin_fetch(part, first, self._host_ids.take(able))), prompt.now_s)
        for handle in handles:
            tree.unlock(handle)
        return tree.match(prompt.key, limit_tokens=prompt.limit), beyond - able

    def _load(self, prompt: ReplayPrompt, match: Match) -> Match:
        """Copy the host's pages of the best match to the device."""
        if match.best_tokens == match.tokens:
            return match
        tree, ids = self.tree, prompt.pages[match.tokens : match.best_tokens]
        handles = tree.lock(match.device_node), tree.lock_host(match.best_node)
        self._make_room(len(ids), prompt.now_s)
        self.device.take(len(ids))
        load = tree.begin_load(match.best_node, {FULL: ids})
        self._free(tree.end(load.op), prompt.now_s)
        for handle in handles:
            tree.unlock(handle)
        self.residency.stored(_sample(ids), prompt.now_s)
        return tree.match(prompt.key, limit_tokens=prompt.limit)

    def _back_up(self, node: int, prompt: ReplayPrompt) -> bool:
        """Copy the path's device-only pages to the host, and to storage. False if the host has no room."""
        needs = self.tree.backup_needs(node).get(FULL, 0)
        if not needs:
            return True
        if self._host_room(needs, prompt.now_s) < needs:
            return False
        self.host.take(needs)
        copy = self.tree.begin_backup(node, {FULL: self._host_ids.take(needs)})
        self._free(self.tree.end(copy.op), prompt.now_s)
        if self.storage is not None:
            self.storage.put(_numbers(copy.legs[0].src_page_ids))
        return True


def _numbers(device_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    """Returns the page numbers of these device ids."""
    return device_ids.view(np.uint32)


def _sample(pages: PageNumbers) -> list[int]:
    return multiples(pages, RESIDENCY_SAMPLE)


class Requests(Protocol):
    """A trace, or a list of requests: iterated once for each replay, never held as a whole."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ReplayRequest]: ...


def _unheard(_request: ReplayRequest, _credit: Credit) -> None:
    pass


def replay(
    requests: Requests,
    config: ReplayConfig,
    step: Callable[[int], object] = int,
    served: Callable[[ReplayRequest, Credit], object] = _unheard,
) -> Report:
    """Serve `requests` in order; `step` gets increments done, `served` each request with its hits.

    Raises ReplayConfigError for a prompt too large.
    """
    server = Server(config)
    began = time.perf_counter()
    every = max(1, len(requests) // 200)
    for number, request in enumerate(requests, start=1):
        served(request, server.serve(request))
        if number % every == 0:
            step(every)
    seconds = time.perf_counter() - began
    step(len(requests) % every)
    return Report(config, len(requests), server.ledger.total().first, seconds, server.residency)
