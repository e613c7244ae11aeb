"""A restore on one rank is a pure state machine, `step(state, event, now)`: LOOK, READ, LOAD, READY.

Each of the first three is an operation that all ranks begin, answer and end together. LOOK asks peers and storage, and
a rank votes for the prefix lengths that it can and would read from each. READ brings the longest length with all votes
to the host, from a peer if it has as much as storage; if a source fails, the next is read for the rest. LOAD brings
host pages to the device. A rank without room for its part answers 0, so that all end with 0 and no rank is waited for.

Pages that other ranks lack are given up. Each missing token has a reason: a rank's own shortfall its own, and the cut
below that is `rank_minimum`. A restore that is given up goes on answering until its operation has ended on all ranks;
its pages come back then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from kvmover.cache.ledger import Credit, Loss
from kvmover.cache.prefix import InvariantBroken
from kvmover.cache.tiers.agreement import PartialWork, agreed_count, counted
from kvmover.cache.tiers.tier_policy import BestEffort, Speed, TierPolicy, patience_s, pays


class RestorePhase(StrEnum):
    """The phase of a restore.

    LOOK: asking peers and storage. READ: from one to the host. LOAD: to the device, or awaiting another's load.
    """

    LOOK = "look"
    READ = "read"
    LOAD = "load"
    READY = "ready"
    ABORTED = "aborted"


_ENDS = (RestorePhase.READY, RestorePhase.ABORTED)
_NO_REASONS: Mapping[Loss, int] = MappingProxyType({})


class RestoreTerms(msgspec.Struct, frozen=True):
    """The terms that all restores of a rank share. `token_bytes`: bytes of KV a token on this rank.

    `partial`: the fate of pages on some ranks alone. `peers`: the most engines that are asked; 0 without a peer tier.
    """

    page_tokens: int
    token_bytes: int
    policy: TierPolicy
    partial: PartialWork
    stored: bool
    peers: int = 0

    @property
    def peer_votes(self) -> int:
        """Returns the numbers in a look's vote beside lengths: of each engine, and two of the digest of all."""
        return self.peers + 2 if self.peers else 0


#: The `source` that stands for storage; peers count from 0.
STORAGE = -1


class ReadSource(msgspec.Struct, frozen=True, order=True):
    """A read that all ranks could do of the prompt's first `pages` pages, from a peer or STORAGE."""

    pages: int
    source: int


class Restoring(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one restore. Tokens count from the prompt's beginning.

    At first `device_tokens` were on the device, `best_tokens` on device or host, `reusable_tokens` on any tier.
    `asked`: the phase of the open operation, which outlasts an abort. `op`: this rank's tree operation, or 0;
    `done_pages`: its answer. `tokens`, `credit` and `lost` count when READY.
    """

    terms: RestoreTerms
    limit_tokens: int
    began_s: float
    device_tokens: int
    best_tokens: int
    reusable_tokens: int
    phase: RestorePhase = RestorePhase.LOOK
    asked: RestorePhase | None = None
    op: int = 0
    op_pages: int = 0
    done_pages: int | None = None
    patience_s: float | None = None
    wanted: bool = False
    stopped: bool = False
    loads: int = 0
    left: tuple[ReadSource, ...] = ()
    reading: ReadSource | None = None
    peer_tokens: int = 0
    reasons: Mapping[Loss, int] = _NO_REASONS
    tokens: int = 0
    credit: Credit = Credit()
    lost: Mapping[Loss, int] = _NO_REASONS

    @property
    def done(self) -> bool:
        """Returns True if ready or given up."""
        return self.phase in _ENDS

    @property
    def over(self) -> bool:
        """Returns True if done without an open operation."""
        return self.done and self.asked is None

    def check(self) -> None:
        """Raise InvariantBroken for an impossible state."""
        page, phase = self.terms.page_tokens, self.phase
        rules = {
            "device, best and reusable prefix are each as long as the one before": (
                0 <= self.device_tokens <= self.best_tokens <= self.reusable_tokens <= self.limit_tokens
            ),
            "prefixes end with a page": not any(
                tokens % page for tokens in (self.device_tokens, self.best_tokens, self.reusable_tokens, self.tokens)
            ),
            "no reason explains less than nothing": min(self.reasons.values(), default=0) >= 0,
            "only a load may have to wait before it is begun": (
                phase in (*_ENDS, RestorePhase.LOAD) or self.asked is phase
            ),
            "a restore that is ready is at no operation": phase is not RestorePhase.READY or self.asked is None,
            "an operation is of the phase, unless the restore was given up": (
                self.asked is None or phase is RestorePhase.ABORTED or self.asked is phase
            ),
            "an operation of the tree is a read's or a load's": (
                not self.op or self.asked in (RestorePhase.READ, RestorePhase.LOAD)
            ),
            "pages are on their way by an operation alone": (self.op != 0) >= (self.op_pages != 0),
            "no more is answered than was begun": self.done_pages is None or 0 <= self.done_pages <= self.op_pages,
            "a read is of a source": self.asked is not RestorePhase.READ or self.reading is not None,
            "nothing is answered that nobody asked": self.done_pages is None or self.asked is not None,
            "one load is begun at most": self.loads <= 1,
            "every reusable token is credited or lost, once": (
                phase is not RestorePhase.READY
                or self.reusable_tokens - sum(self.lost.values()) == self.tokens == self.credit.tokens
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise InvariantBroken(f"{rule}: {self}")


class LookedUp(msgspec.Struct, frozen=True):
    """The answers of peers and storage to this rank.

    `pages`: prefix lengths that storage can complete, ascending; 0 alone after a failure. `peers`: leading pages of
    each. `way`, `peer_way`: measured speeds of the tiers to come by, if any. `mark`: a digest of the engines asked,
    which may differ while ranks hear of an engine one after another: peers are then not read.
    """

    pages: Sequence[int]
    way: tuple[Speed, ...] = ()
    peers: tuple[int, ...] = ()
    peer_way: tuple[Speed, ...] = ()
    mark: int = 0


class FetchBegun(msgspec.Struct, frozen=True):
    """The start of the tree's `op`, which reads `pages` pages into host pages."""

    op: int
    pages: int


class HostFull(msgspec.Struct, frozen=True):
    """A lack of host pages for `tokens`: too few are free, or reads hold their share."""

    tokens: int


class FetchEnded(msgspec.Struct, frozen=True):
    """The end of this rank's read after its first `pages` pages; `loss` says why no more came."""

    pages: int
    loss: Loss | None = None


class Rematched(msgspec.Struct, frozen=True):
    """A new match: `tokens` on the device, `best_tokens` on device or host.

    `waits`: another load brings more and is awaited; no lock was taken.
    """

    tokens: int
    best_tokens: int
    waits: bool = False


class LoadBegun(msgspec.Struct, frozen=True):
    """The start of the tree's `op`, which copies `pages` pages into device pages."""

    op: int
    pages: int


class DeviceFull(msgspec.Struct, frozen=True):
    """A lack of device pages: `tokens` are there, `missing_tokens` would come, `room_tokens` have room."""

    tokens: int
    missing_tokens: int
    room_tokens: int


class LoadEnded(msgspec.Struct, frozen=True):
    """The landing of this rank's copy to the device."""


class RanksAgreed(msgspec.Struct, frozen=True):
    """The end of the operation on all ranks with the minimum `answer`. `stopped`: a rank asked to stop."""

    answer: Sequence[int]
    stopped: bool = False


class Secured(msgspec.Struct, frozen=True):
    """A lock on the first `tokens` tokens on the device."""

    tokens: int


class Hurry(msgspec.Struct, frozen=True):
    """An event: the request is to start now."""


class GivenUp(msgspec.Struct, frozen=True):
    """The cancellation of the request."""


class TimePassed(msgspec.Struct, frozen=True):
    """The beginning of a round."""


RestoreEvent: TypeAlias = (
    LookedUp
    | FetchBegun
    | HostFull
    | FetchEnded
    | Rematched
    | LoadBegun
    | DeviceFull
    | LoadEnded
    | RanksAgreed
    | Secured
    | Hurry
    | GivenUp
    | TimePassed
)

# Actions, to be carried out in order.


class LookUp(msgspec.Struct, frozen=True):
    """An action: begin an operation, and ask peers and storage for the first `pages` pages."""

    pages: int


class BeginFetch(msgspec.Struct, frozen=True):
    """An action: take host pages, begin an operation, and read `pages` pages. `source`: a peer's number, or STORAGE."""

    pages: int
    source: int = STORAGE


class Decline(msgspec.Struct, frozen=True):
    """An action: tell peers that their offers will not be read."""


class BeginLoad(msgspec.Struct, frozen=True):
    """An action: take device pages up to `tokens` tokens, begin an operation, and copy."""

    tokens: int


class BeginNothing(msgspec.Struct, frozen=True):
    """An action: join the other ranks' operation without a part."""


class Vote(msgspec.Struct, frozen=True):
    """An action: answer the open operation."""

    answer: tuple[int, ...]


class AskToStop(msgspec.Struct, frozen=True):
    """An action: ask all ranks to end with the pages they have."""


class EndCopy(msgspec.Struct, frozen=True):
    """An action: tell the tree that the first `pages` pages of `op` are there; other ids come back."""

    op: int
    pages: int


class Abandon(msgspec.Struct, frozen=True):
    """An action: end the tree's `op` (0: no pages here) with no page, once no rank's pages of a failed read can be
    written.
    """

    op: int


class Rematch(msgspec.Struct, frozen=True):
    """An action: match again, and lock the match unless it waits."""


class Secure(msgspec.Struct, frozen=True):
    """An action: lock the device pages for the request."""


class LetGo(msgspec.Struct, frozen=True):
    """An action: give back the locks of found pages."""


RestoreAction: TypeAlias = (
    LookUp
    | BeginFetch
    | Decline
    | BeginLoad
    | BeginNothing
    | Vote
    | AskToStop
    | EndCopy
    | Abandon
    | Rematch
    | Secure
    | LetGo
)
RestoreStep: TypeAlias = tuple[Restoring, list[RestoreAction]]


def start(terms: RestoreTerms, limit_tokens: int, tokens: int, best_tokens: int, now: float) -> RestoreStep:
    """Begin a request with `tokens` on the device and `best_tokens` on device or host, locked there.

    Looks for the rest of `limit_tokens` unless it is below the policy's `least_tokens`.
    """
    state = Restoring(
        terms=terms,
        limit_tokens=limit_tokens,
        began_s=now,
        device_tokens=tokens,
        best_tokens=best_tokens,
        reusable_tokens=best_tokens,
    )
    pages = limit_tokens // terms.page_tokens
    if (terms.stored or terms.peers) and pages * terms.page_tokens - best_tokens >= max(1, terms.policy.least_tokens):
        return _ask(state, RestorePhase.LOOK), [LookUp(pages)]
    return _load(state)


def step(state: Restoring, event: RestoreEvent, now: float) -> RestoreStep:
    """Advance by an event at `now`, s. A restore that is over stays as it is."""
    match event:
        case TimePassed():
            return _tick(state, now)
        case LookedUp():
            return _looked_up(state, event)
        case FetchBegun(op, pages) | LoadBegun(op, pages):
            return replace(state, op=op, op_pages=pages), []
        case HostFull(tokens):
            return _vote(_short(state, Loss.HOST_CAPACITY, tokens), 0, [BeginNothing()])
        case FetchEnded(pages, loss):
            return _fetched(state, pages, loss or Loss.LATE)
        case LoadEnded():
            return _vote(state, state.op_pages, [])
        case RanksAgreed():
            return _agreed(state, event)
        case Rematched():
            return _rematched(state, event)
        case DeviceFull():
            return _device_full(state, event)
        case Secured(tokens):
            return _ready(state, tokens), [LetGo()]
        case Hurry():
            return replace(state, wanted=True), []
        case GivenUp():
            return _given_up(state)


def _tick(state: Restoring, now: float) -> RestoreStep:
    if state.phase is RestorePhase.LOAD and state.asked is None:
        return state, [Rematch()]
    if state.phase is not RestorePhase.READ or state.stopped:
        return state, []
    late = state.patience_s is not None and now - state.began_s >= state.patience_s
    wanted = state.wanted and isinstance(state.terms.policy.prefetch, BestEffort)
    return (replace(state, stopped=True), [AskToStop()]) if late or wanted else (state, [])


def _given_up(state: Restoring) -> RestoreStep:
    if state.done:
        return state, []
    stop: list[RestoreAction] = [AskToStop()] if state.asked is not None else []
    return replace(state, phase=RestorePhase.ABORTED, stopped=bool(stop)), [*stop, LetGo()]


# Peers and storage.


def _looked_up(state: Restoring, event: LookedUp) -> RestoreStep:
    """Vote for lengths worth reading; the rest is lost to the threshold."""
    page, best = state.terms.page_tokens, state.best_tokens // state.terms.page_tokens
    beyond = [pages for pages in event.pages if pages > best]
    stored, lent = beyond[-1] if beyond else 0, max(event.peers, default=0)
    most = max(stored, lent)
    state = replace(state, reusable_tokens=max(state.reusable_tokens, most * page))
    peers = tuple(pages if _would_read(state, pages, event.peer_way) else 0 for pages in event.peers)
    if not _would_read(state, stored, event.way):
        beyond = []
    would = max((*beyond, *peers), default=0)
    state = _short(state, Loss.THRESHOLD, (most - max(would, best)) * page)
    chosen = frozenset(beyond)
    votes = (int(pages in chosen) for pages in range(state.limit_tokens // page + 1))
    padding = (0,) * (state.terms.peers - len(peers))
    marks = (event.mark, -event.mark) if state.terms.peers else ()
    return state, [Vote((*votes, *peers, *padding, *marks))]


def _would_read(state: Restoring, pages: int, way: tuple[Speed, ...]) -> bool:
    policy, tokens = state.terms.policy, pages * state.terms.page_tokens - state.best_tokens
    return tokens >= max(1, policy.least_tokens) and pays(policy.prefetch, tokens, state.terms.token_bytes, way)


def _chosen(state: Restoring, answer: Sequence[int]) -> RestoreStep:
    """Read the longest prefix that all ranks voted for, from a peer unless storage has more."""
    page, best = state.terms.page_tokens, state.best_tokens // state.terms.page_tokens
    lengths = state.limit_tokens // page + 1
    stored = max((number for number, votes in enumerate(answer[:lengths]) if votes), default=0)
    lent, marks = answer[lengths : lengths + state.terms.peers], answer[lengths + state.terms.peers :]
    if sum(marks):  # the least mark of all ranks, less the greatest
        lent = ()
    peers = (ReadSource(pages, number) for number, pages in enumerate(lent))
    sources = sorted((*peers, ReadSource(stored, STORAGE)), key=_longest_and_nearest)
    state = replace(state, left=tuple(each for each in sources if each.pages > best))
    pages = state.left[0].pages if state.left else best
    mine = state.reusable_tokens - state.reasons.get(Loss.THRESHOLD, 0)
    state = _short(state, Loss.RANK_MINIMUM, mine - pages * page)
    if state.left:
        return _read_next(state)
    state, actions = _load(state)
    return state, [Decline(), *actions] if state.terms.peers else actions


def _longest_and_nearest(each: ReadSource) -> tuple[int, int, int]:
    return -each.pages, int(each.source == STORAGE), each.source


def _read_next(state: Restoring) -> RestoreStep:
    chosen, *left = state.left
    tokens = chosen.pages * state.terms.page_tokens - state.best_tokens
    state = replace(_ask(state, RestorePhase.READ), reading=chosen, left=tuple(left))
    state = replace(state, patience_s=patience_s(state.terms.policy.prefetch, tokens))
    declined = [Decline()] if chosen.source == STORAGE and state.terms.peers else []
    return state, [*declined, BeginFetch(chosen.pages, chosen.source)]


def _fetched(state: Restoring, pages: int, loss: Loss) -> RestoreStep:
    """Vote for the pages read; a part that would be dropped counts as 0."""
    if state.terms.partial is PartialWork.DROPPED and pages < state.op_pages:
        pages = 0
    return _vote(_short(state, loss, (state.op_pages - pages) * state.terms.page_tokens), pages, [])


# Host to device.


def _load(state: Restoring) -> RestoreStep:
    return replace(state, phase=RestorePhase.LOAD), [Rematch()]


def _rematched(state: Restoring, event: Rematched) -> RestoreStep:
    if event.waits:
        return state, []
    missing = event.best_tokens - event.tokens
    if not missing or state.loads:
        return state, [Secure()]
    state = replace(state, loads=state.loads + 1)
    if missing < state.terms.policy.least_load_tokens:
        return _short(state, Loss.THRESHOLD, missing), [Secure()]
    return _ask(state, RestorePhase.LOAD), [BeginLoad(event.best_tokens)]


def _device_full(state: Restoring, event: DeviceFull) -> RestoreStep:
    """Load as much as has room, if parts are kept; else vote for 0 pages."""
    missing, room = event.missing_tokens, event.room_tokens
    if state.terms.partial is PartialWork.KEPT and 0 < room < missing:
        return _short(state, Loss.DEVICE_CAPACITY, missing - room), [BeginLoad(event.tokens + room)]
    return _vote(_short(state, Loss.DEVICE_CAPACITY, missing), 0, [BeginNothing()])


# All ranks.


def _ask(state: Restoring, phase: RestorePhase) -> Restoring:
    return replace(state, phase=phase, asked=phase, op=0, op_pages=0, done_pages=None, stopped=False)


def _vote(state: Restoring, pages: int, before: list[RestoreAction]) -> RestoreStep:
    return replace(state, done_pages=pages), [*before, Vote(counted(pages, state.op_pages))]


def _agreed(state: Restoring, event: RanksAgreed) -> RestoreStep:
    answer = event.answer
    phase, op, mine = state.asked, state.op, state.done_pages or 0
    state = replace(state, asked=None, op=0, op_pages=0, done_pages=None, stopped=False)
    if phase is RestorePhase.LOOK:
        return (state, []) if state.done else _chosen(state, answer)
    ends: list[RestoreAction] = []
    pages = agreed_count(answer, state.terms.partial)
    if op:
        state = _short(state, Loss.RANK_MINIMUM, (mine - pages) * state.terms.page_tokens)
    lent = phase is RestorePhase.READ and state.reading is not None and state.reading.source != STORAGE
    if lent and not pages:
        ends.append(Abandon(op))
    elif op:
        ends.append(EndCopy(op, pages))
    if state.done:
        return state, ends
    state, actions = _after_read(state, event, pages) if phase is RestorePhase.READ else _load(state)
    return state, [*ends, *actions]


def _after_read(state: Restoring, event: RanksAgreed, pages: int) -> RestoreStep:
    """Load the pages that came; if a peer fell short unstopped, read the next source first."""
    page, chosen, total = state.terms.page_tokens, state.reading, int(event.answer[1])
    assert chosen is not None
    reached = chosen.pages - total + pages
    if chosen.source != STORAGE and pages:
        state = replace(state, peer_tokens=reached * page)
    state = replace(state, reading=None)
    more = tuple(each for each in state.left if each.pages > reached)
    if more and chosen.source != STORAGE and pages < total and not event.stopped:
        return _read_next(replace(state, left=more))
    return _load(replace(state, left=()))


# The account.


def _short(state: Restoring, reason: Loss, tokens: int) -> Restoring:
    if tokens <= 0:
        return state
    return replace(state, reasons={**state.reasons, reason: state.reasons.get(reason, 0) + tokens})


def _ready(state: Restoring, tokens: int) -> Restoring:
    """Credit tokens by their tier at the request's coming, the rest lost by reason."""
    device, best = state.device_tokens, state.best_tokens
    # Tokens beyond those found were computed by other requests meanwhile.
    more = max(0, tokens - state.reusable_tokens)
    reusable = state.reusable_tokens + more
    here = tokens - more
    on_device = min(here, device)
    on_host = min(here, best) - on_device
    lent = max(0, min(here, state.peer_tokens) - on_device - on_host)
    return replace(
        state,
        phase=RestorePhase.READY,
        reusable_tokens=reusable,
        tokens=tokens,
        credit=Credit(on_device + more, on_host, here - on_device - on_host - lent, lent),
        lost=balanced(state.reasons, reusable - tokens),
    )


def balanced(reasons: Mapping[Loss, int], due: int) -> dict[Loss, int]:
    """Return losses that add up to `due` tokens, in the order of Loss; the unexplained rest was evicted meanwhile.

    >>> balanced({Loss.LATE: 32, Loss.THRESHOLD: 16}, 40)
    {<Loss.THRESHOLD: 'threshold'>: 16, <Loss.LATE: 'late'>: 24}
    """
    lost: dict[Loss, int] = {}
    for reason in Loss:
        tokens = min(reasons.get(reason, 0), due)
        if tokens > 0:
            lost[reason] = tokens
            due -= tokens
    if due:
        lost[Loss.CAPACITY_EVICTED] = lost.get(Loss.CAPACITY_EVICTED, 0) + due
    return lost
