"""One restore on one rank as a pure state machine, `step(state, event, now)`: LOOK, READ, LOAD, READY.

Each of the first three is an operation that all ranks begin, answer and end together. LOOK asks peers and storage, and
a rank votes for the prefix lengths that it can and would read from each. READ brings the longest that all voted for to
the host, from a peer where that has as much as storage; what one source fails to bring, the next one is read for. LOAD
brings what the host has to the device. A rank that cannot begin its part, for want of room, votes for nothing, so that
all end with nothing: no rank is waited for.

What a rank brings and another one does not is given up, and what is not brought has a reason: a rank's own shortfall
has its own, and the cut below that is `rank_minimum`. A restore that is given up goes on answering until its operation
has ended on all ranks; its pages come back then.
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

# What happens to it.


class LookedUp(msgspec.Struct, frozen=True):
    """All have answered this rank. `pages`: ascending, the lengths of prefixes that storage has or that are nearer;
    `peers`: how many first pages each peer has.

    `way` and `peer_way`: the measured speeds of the tiers to come by, none where they are not known. No pages after a
    failure.
    """

    pages: Sequence[int]
    way: tuple[Speed, ...] = ()
    peers: tuple[int, ...] = ()
    peer_way: tuple[Speed, ...] = ()


class FetchBegun(msgspec.Struct, frozen=True):
    """Host pages are taken, and `pages` pages are being read into them by the tree's operation `op`."""

    op: int
    pages: int


class HostFull(msgspec.Struct, frozen=True):
    """No host page was taken: there are too few for `tokens`, or reads have their share of them."""

    tokens: int


class FetchEnded(msgspec.Struct, frozen=True):
    """This rank's read is over with its first `pages` pages; `loss` says why not with more."""

    pages: int
    loss: Loss | None = None


class Rematched(msgspec.Struct, frozen=True):
    """What the tree has by now: `tokens` on the device, `best_tokens` on device or host.

    `waits`: that another's load brings more, which is to be waited for; then nothing was locked.
    """

    tokens: int
    best_tokens: int
    waits: bool = False


class LoadBegun(msgspec.Struct, frozen=True):
    """Device pages are taken, and `pages` pages are being copied into them by the tree's operation `op`."""

    op: int
    pages: int


class DeviceFull(msgspec.Struct, frozen=True):
    """No device page was taken: `tokens` are there, `missing_tokens` more would come, and `room_tokens` have room."""

    tokens: int
    missing_tokens: int
    room_tokens: int


class LoadEnded(msgspec.Struct, frozen=True):
    """This rank's copy to the device has landed."""


class RanksAgreed(msgspec.Struct, frozen=True):
    """The operation has ended on all ranks, with the minimum of their answers. `stopped`: some rank had asked to."""

    answer: Sequence[int]
    stopped: bool = False


class Secured(msgspec.Struct, frozen=True):
    """The first `tokens` tokens are on the device, and locked for the request."""

    tokens: int


class Hurry(msgspec.Struct, frozen=True):
    """The request is to start now."""


class GivenUp(msgspec.Struct, frozen=True):
    """Nobody wants the request any more."""


class TimePassed(msgspec.Struct, frozen=True):
    """A round begins."""


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

# What it asks for, to be done in order.


class LookUp(msgspec.Struct, frozen=True):
    """Begin an operation of all ranks, and ask peers and storage for the first `pages` pages. LookedUp when all have
    answered.
    """

    pages: int


class BeginFetch(msgspec.Struct, frozen=True):
    """Take host pages for the first `pages` pages, begin an operation of all ranks, read: FetchBegun, or HostFull.

    `source`: of which peer, or STORAGE.
    """

    pages: int
    source: int = STORAGE


class Decline(msgspec.Struct, frozen=True):
    """Tell peers that nothing of what they offered will be read."""


class BeginLoad(msgspec.Struct, frozen=True):
    """Take device pages for the first `tokens` tokens, begin an operation of all ranks and copy: LoadBegun, or
    DeviceFull.
    """

    tokens: int


class BeginNothing(msgspec.Struct, frozen=True):
    """Begin the operation that other ranks begin now, without a part in it."""


class Vote(msgspec.Struct, frozen=True):
    """This rank's answer to the operation under way."""

    answer: tuple[int, ...]


class AskToStop(msgspec.Struct, frozen=True):
    """Tell all ranks to end the operation under way with what they have."""


class EndCopy(msgspec.Struct, frozen=True):
    """Tell the tree that the first `pages` pages of its operation are there; the others' ids come back."""

    op: int
    pages: int


class Abandon(msgspec.Struct, frozen=True):
    """A read from a peer came to nothing, on all ranks: begin an operation that ends once no rank's pages can be
    written any more, and then tell the tree that nothing of `op` came. 0: this rank took none.
    """

    op: int


class Rematch(msgspec.Struct, frozen=True):
    """Match again, and lock what is found on both tiers unless it waits: Rematched."""


class Secure(msgspec.Struct, frozen=True):
    """Lock what is on the device for the request: Secured."""


class LetGo(msgspec.Struct, frozen=True):
    """Give back the locks that kept what was found until it was brought."""


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
    """A request whose first `tokens` are on the device and `best_tokens` on device or host, and locked there.

    Peers and storage are asked for the rest of `limit_tokens` where that is not below the policy's threshold.
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
    """Advance by one event. What comes to a restore that is over changes nothing."""
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
    """Ask for an end of a read that took too long, and go on where another's load was waited for."""
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


# Storage.


def _looked_up(state: Restoring, event: LookedUp) -> RestoreStep:
    """This rank's vote: 1 for a number of pages that it can and would read from storage, and how many from each peer;
    and why not for those it would not.
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
    """Whether so many first pages are worth a read."""
    policy, tokens = state.terms.policy, pages * state.terms.page_tokens - state.best_tokens
    return tokens >= max(1, policy.least_tokens) and pays(policy.prefetch, tokens, state.terms.token_bytes, way)


def _chosen(state: Restoring, answer: Sequence[int]) -> RestoreStep:
    """Read the longest prefix that all ranks voted for, of a peer where storage has no more; what this one would have
    read beyond is lost to the others.
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
    """Of the source that all ranks have next in line."""
    chosen, *left = state.left
    tokens = chosen.pages * state.terms.page_tokens - state.best_tokens
    state = replace(_ask(state, RestorePhase.READ), reading=chosen, left=tuple(left))
    state = replace(state, patience_s=patience_s(state.terms.policy.prefetch, tokens))
    declined = [Decline()] if chosen.source == STORAGE and state.terms.peers else []
    return state, [*declined, BeginFetch(chosen.pages, chosen.source)]


def _fetched(state: Restoring, pages: int, loss: Loss) -> RestoreStep:
    """A part that is of no use is no part: all of it is this rank's own shortfall."""
    if state.terms.partial is PartialWork.DROPPED and pages < state.op_pages:
        pages = 0
    return _vote(_short(state, loss, (state.op_pages - pages) * state.terms.page_tokens), pages, [])


# Host to device.


def _load(state: Restoring) -> RestoreStep:
    return replace(state, phase=RestorePhase.LOAD), [Rematch()]


def _rematched(state: Restoring, event: Rematched) -> RestoreStep:
    """Load what the host has, once; or wait for somebody else's load of it."""
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
    """As much as there is room for, where a part is of use; else nothing."""
    missing, room = event.missing_tokens, event.room_tokens
    if state.terms.partial is PartialWork.KEPT and 0 < room < missing:
        return _short(state, Loss.DEVICE_CAPACITY, missing - room), [BeginLoad(event.tokens + room)]
    return _vote(_short(state, Loss.DEVICE_CAPACITY, missing), 0, [BeginNothing()])


# All ranks.


def _ask(state: Restoring, phase: RestorePhase) -> Restoring:
    """At an operation of all ranks now, of which this one has not begun its part."""
    return replace(state, phase=phase, asked=phase, op=0, op_pages=0, done_pages=None, stopped=False)


def _vote(state: Restoring, pages: int, before: list[RestoreAction]) -> RestoreStep:
    """This rank has done `pages` of its part of a read or a load."""
    return replace(state, done_pages=pages), [*before, Vote(counted(pages, state.op_pages))]


def _agreed(state: Restoring, event: RanksAgreed) -> RestoreStep:
    """Every rank keeps what all have. A restore that was given up ends here."""
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
    """Load what came; where not all came, and nobody is in a hurry, what another source has is read instead."""
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
    """`tokens` will not come, for `reason`."""
    if tokens <= 0:
        return state
    return replace(state, reasons={**state.reasons, reason: state.reasons.get(reason, 0) + tokens})


def _ready(state: Restoring, tokens: int) -> Restoring:
    """The end: credit what is on the device by where it was when the request came, and say why the rest is lost."""
    device, best = state.device_tokens, state.best_tokens
    # More than was found anywhere is what other requests have computed meanwhile.
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
    """Reasons that add up to `due` tokens: the first to apply first, and what none explains was taken meanwhile.

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
