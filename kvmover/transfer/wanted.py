"""Wanted: what a destination knows of a request it asked for, and how it is told at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.plan.cost import Route
from kvmover.transfer import receiving
from kvmover.transfer.core import Core
from kvmover.transfer.lane import Lane
from kvmover.transfer.meter import Stage
from kvmover.transfer.posts import Pages
from kvmover.transfer.result import Cause, Result, Transfer

#: Which event makes an attempt fail for which cause; any other is a peer that breaks the protocol.
CAUSES: dict[type[receiving.Event], Cause] = {
    receiving.Cancel: Cause.ABORTED,
    receiving.PeerAborted: Cause.PEER_ABORTED,
    receiving.PeerGone: Cause.PEER_LOST,
    receiving.Tick: Cause.DEADLINE,
    receiving.ReadEnded: Cause.TRANSPORT,
    receiving.Scattered: Cause.INTEGRITY,
}

Id = tuple[str, int]


@dataclass(slots=True, eq=False)
class Attempt:
    """A request that this rank wants: its state, its page tables, and the lane from each source.

    `wants`: what each source was asked, encoded. `theirs`: page tables of sources that are read from pages to pages.
    """

    state: receiving.Receiving
    transfer: Transfer
    pages: Pages
    lanes: dict[str, Lane]
    seats: dict[str, tuple[str, int]]
    runs: int
    wants: dict[str, bytes] = field(default_factory=dict[str, bytes])
    theirs: dict[str, Pages] = field(default_factory=dict[str, Pages])
    aux: dict[int, bytes] = field(default_factory=dict[int, bytes])
    asked: dict[receiving.WriterChunk, float] = field(default_factory=dict[receiving.WriterChunk, float])
    cause: Cause | None = None
    resent: int = 0

    @property
    def id(self) -> Id:
        return self.state.request, self.state.generation


def close(attempt: Attempt, core: Core, held: frozenset[str]) -> None:
    """Tell the engine how it ended, and count it."""
    state, lanes, transfer = attempt.state, attempt.lanes.values(), attempt.transfer
    seconds = core.clock() - transfer.started
    core.meter.ended["receive", attempt.cause.value if attempt.cause else "landed"] += 1
    core.meter.took(Stage.RECEIVE, seconds)
    transfer.held = bool(held)
    transfer.result = Result(
        state.reason,
        seconds,
        sum(lane.nbytes for lane in lanes),
        attempt.runs,
        sum(len(lane.chunks) for lane in lanes),
        tuple(Route.DIRECT if s.direct else Route.PACKED for s in state.sources.values() if s.chunks),
        sum(bool(lane.chunks) for lane in lanes),
        bool(held),
        attempt.cause,
        attempt.resent,
        incomplete(attempt) if state.reason is not None else (),
        attempt.aux,
    )
    core.ended("receive", transfer.request, transfer.result)


def incomplete(attempt: Attempt) -> tuple[tuple[int, ...], ...]:
    """Page table indices, a component, of pages that a chunk is missing from.

    What was read counts only if its source has confirmed that it was still its own.
    """
    missing, state = [set[int]() for _ in attempt.pages], attempt.state
    for peer, lane in attempt.lanes.items():
        for chunk in range(len(lane.chunks)):
            if (peer, chunk) not in state.landed or peer in state.unconfirmed:
                for component, pages in lane.target_pages(chunk):
                    missing[component].update(pages.tolist())
    return tuple(tuple(sorted(pages)) for pages in missing)
