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
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from kvmover.cache.ledger import Credit, Loss
from kvmover.cache.tiers.agreement import PartialWork, agreed_count, counted
from kvmover.cache.tiers.policy import BestEffort, Speed, patience_s, pays
from kvmover.cache.tiers.restore_state import STORAGE, ReadSource, RestorePhase, RestoreTerms, Restoring

# Events.


class LookedUp(msgspec.Struct, frozen=True):
    """An event: peers and storage have answered this rank.

    `pages`: prefix lengths that storage can complete, ascending; 0 alone after a failure. `peers`: leading pages of
    each peer. `way`, `peer_way`: measured speeds of the tiers to come by, empty if unmeasured.
    """

    pages: Sequence[int]
    way: tuple[Speed, ...] = ()
    peers: tuple[int, ...] = ()
    peer_way: tuple[Speed, ...] = ()


class FetchBegun(msgspec.Struct, frozen=True):
    """An event: host pages are taken, and the tree's operation `op` reads `pages` pages into them."""

    op: int
    pages: int


class HostFull(msgspec.Struct, frozen=True):
    """An event: no host page was taken for `tokens`, as too few are free or reads hold their share."""

    tokens: int


class FetchEnded(msgspec.Struct, frozen=True):
    """An event: this rank's read ended with its first `pages` pages; `loss` says why no more came."""

    pages: int
    loss: Loss | None = None


class Rematched(msgspec.Struct, frozen=True):
    """An event: the tree now has `tokens` on the device, `best_tokens` on device or host.

    `waits`: another load brings more and is to be awaited; no lock was taken then.
    """

    tokens: int
    best_tokens: int
    waits: bool = False


class LoadBegun(msgspec.Struct, frozen=True):
    """An event: device pages are taken, and the tree's operation `op` copies `pages` pages into them."""

    op: int
    pages: int


class DeviceFull(msgspec.Struct, frozen=True):
    """An event: no device page was taken. `tokens` are there, `missing_tokens` would come, `room_tokens` have room."""

    tokens: int
    missing_tokens: int
    room_tokens: int


class LoadEnded(msgspec.Struct, frozen=True):
    """An event: this rank's copy to the device has landed."""


class RanksAgreed(msgspec.Struct, frozen=True):
    """An event: the operation ended on all ranks with the minimum `answer`. `stopped`: a rank had asked to stop."""

    answer: Sequence[int]
    stopped: bool = False


class Secured(msgspec.Struct, frozen=True):
    """An event: the first `tokens` tokens are on the device, and locked for the request."""

    tokens: int


class Hurry(msgspec.Struct, frozen=True):
    """An event: the request is to start now."""


class GivenUp(msgspec.Struct, frozen=True):
    """An event: the request is cancelled."""


class TimePassed(msgspec.Struct, frozen=True):
    """An event: a round begins."""


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
    """An action: begin an operation, and ask peers and storage for the first `pages` pages: LookedUp."""

    pages: int


class BeginFetch(msgspec.Struct, frozen=True):
    """An action: take host pages for the first `pages` pages, begin an operation, and read: FetchBegun or HostFull.

    `source`: a peer's number, or STORAGE.
    """

    pages: int
    source: int = STORAGE


class Decline(msgspec.Struct, frozen=True):
    """An action: tell peers that no page of their offers will be read."""


class BeginLoad(msgspec.Struct, frozen=True):
    """An action: take device pages up to `tokens` tokens, begin an operation, and copy: LoadBegun or DeviceFull."""

    tokens: int


class BeginNothing(msgspec.Struct, frozen=True):
    """An action: begin the operation that other ranks begin now, without a part in it."""


class Vote(msgspec.Struct, frozen=True):
    """An action: answer the open operation for this rank."""

    answer: tuple[int, ...]


class AskToStop(msgspec.Struct, frozen=True):
    """An action: ask all ranks to end the open operation with the pages they have."""


class EndCopy(msgspec.Struct, frozen=True):
    """An action: tell the tree that the first `pages` pages of `op` are there; the other ids come back."""

    op: int
    pages: int


class Abandon(msgspec.Struct, frozen=True):
    """An action: begin an operation that ends once no rank's pages of a failed read can be written any more.

    The tree's `op` then ends with no page; 0 if this rank took no page.
    """

    op: int


class Rematch(msgspec.Struct, frozen=True):
    """An action: match again, and lock the match on both tiers unless it waits: Rematched."""


class Secure(msgspec.Struct, frozen=True):
    """An action: lock the device pages for the request: Secured."""


class LetGo(msgspec.Struct, frozen=True):
    """An action: give back the locks that kept found pages until they were restored."""


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

    Peers and storage are asked for the rest of `limit_tokens` if that is not below the policy's `least_tokens`. Returns
    the state and its first actions.
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
    """Advance by an event at `now`, s. Returns the new state and its actions. A restore that is over stays as it is."""
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
    """Stop a read that took too long, and match again after another restore's load."""
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
    """Vote 1 for each number of pages that this rank can and would read from storage, and pages from each peer.

    Pages that it would not read are lost to the threshold.
    """
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
    return state, [Vote((*votes, *peers, *(0,) * (state.terms.peers - len(peers))))]


def _would_read(state: Restoring, pages: int, way: tuple[Speed, ...]) -> bool:
    """Return True if so many leading pages are worth a read."""
    policy, tokens = state.terms.policy, pages * state.terms.page_tokens - state.best_tokens
    return tokens >= max(1, policy.least_tokens) and pays(policy.prefetch, tokens, state.terms.token_bytes, way)


def _chosen(state: Restoring, answer: Sequence[int]) -> RestoreStep:
    """Read the longest prefix that all ranks voted for, from a peer unless storage has more.

    Pages beyond, which this rank alone would have read, are lost to the rank minimum.
    """
    page, best = state.terms.page_tokens, state.best_tokens // state.terms.page_tokens
    lengths = state.limit_tokens // page + 1
    stored = max((number for number, votes in enumerate(answer[:lengths]) if votes), default=0)
    peers = (ReadSource(pages, number) for number, pages in enumerate(answer[lengths : lengths + state.terms.peers]))
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
    """Read from the first source left, alike on all ranks."""
    chosen, *left = state.left
    tokens = chosen.pages * state.terms.page_tokens - state.best_tokens
    state = replace(_ask(state, RestorePhase.READ), reading=chosen, left=tuple(left))
    state = replace(state, patience_s=patience_s(state.terms.policy.prefetch, tokens))
    declined = [Decline()] if chosen.source == STORAGE and state.terms.peers else []
    return state, [*declined, BeginFetch(chosen.pages, chosen.source)]


def _fetched(state: Restoring, pages: int, loss: Loss) -> RestoreStep:
    """Vote for the pages read; a part that would be dropped counts as 0, all of it this rank's own shortfall."""
    if state.terms.partial is PartialWork.DROPPED and pages < state.op_pages:
        pages = 0
    return _vote(_short(state, loss, (state.op_pages - pages) * state.terms.page_tokens), pages, [])


# Host to device.


def _load(state: Restoring) -> RestoreStep:
    return replace(state, phase=RestorePhase.LOAD), [Rematch()]


def _rematched(state: Restoring, event: Rematched) -> RestoreStep:
    """Load the host's pages, once; or wait for another restore's load of them."""
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
    """Return the state in a new operation of all ranks, before this rank's part has begun."""
    return replace(state, phase=phase, asked=phase, op=0, op_pages=0, done_pages=None, stopped=False)


def _vote(state: Restoring, pages: int, before: list[RestoreAction]) -> RestoreStep:
    """Answer that this rank has done `pages` of its part of a read or a load."""
    return replace(state, done_pages=pages), [*before, Vote(counted(pages, state.op_pages))]


def _agreed(state: Restoring, event: RanksAgreed) -> RestoreStep:
    """Keep the pages that all ranks have. A restore that was given up ends here."""
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
    """Load the pages that came; if a peer fell short and no rank asked to stop, read the next source with more."""
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
    """Return the state with `tokens` more lost for `reason`."""
    if tokens <= 0:
        return state
    return replace(state, reasons={**state.reasons, reason: state.reasons.get(reason, 0) + tokens})


def _ready(state: Restoring, tokens: int) -> Restoring:
    """Return the final state: device tokens credited by their tier at the request's coming, the rest lost by reason."""
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
