"""ConnectorWorker is the half beside the model: it carries out the scheduler half's orders and reports the outcomes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmover.engines.common import Mark
from kvmover.engines.vllm.block_store import OffloadWorker
from kvmover.engines.vllm.caches import ComponentCache
from kvmover.engines.vllm.connector_metadata import KvmoverConnectorMetadata, RankEnding, ReceiveSpec, SendSpec, Tables
from kvmover.engines.vllm.transfers import Over, RequestTransfers
from kvmover.layout import Fleet
from kvmover.repeats import Repeats, form_of
from kvmover.store import Namespace
from kvmover.transfer import Model
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.result import ALL, Cause, Gate
from kvmover.transport import Transport

log = logging.getLogger(__name__)


class Tell(Protocol):
    """A function that reports a failed transfer, `way` "sent" or "received"."""

    def __call__(self, way: str, over: Over) -> None: ...


@dataclass(slots=True)
class FailureLog:
    """A log of failed transfers, one line a minute for reasons of one form."""

    clock: Callable[[], float] = time.monotonic
    _repeats: Repeats = field(default_factory=Repeats)

    def failed(self, way: str, over: Over) -> None:
        """Log a failure; INFO if the engine itself aborted the transfer."""
        given_up = over.result is not None and over.result.cause is Cause.ABORTED
        if (more := self._repeats.more((way, given_up, form_of(str(over.reason))), self.clock())) is not None:
            level = logging.INFO if given_up else logging.WARNING
            log.log(level, "%s was not %s: %s%s", over.request, way, over.reason, more)

    def unbegun(self, way: str, over: Over) -> None:
        """Log a transfer that never began: the mover's watchers report the others."""
        if over.result is None:
            self.failed(way, over)


@dataclass(slots=True)
class Ended:
    """The requests that ended in a step: sent ones whose pages are not read any more, received ones, and of these the
    ones that failed as a whole.

    `blocks`: incomplete blocks, where a block id identifies the request. `quarantined`: failed requests whose pages may
    still be written; `returned`: those of earlier steps whose pages are free now.
    """

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    blocks: set[int] = field(default_factory=set[int])
    quarantined: set[str] = field(default_factory=set[str])
    returned: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class Computing:
    """A request whose positions below `stop` are computed by this step, and its new blocks. `contents`: those of the
    prefixes that this adds to a request that may move.
    """

    request: str
    stop: int
    pages: list[list[int]] | None = None
    contents: tuple[Content, ...] = ()


@dataclass(slots=True)
class ConnectorWorker:
    """The worker's half on one rank.

    `layers`: names of the model's layers in its caches, in order, the first of which is the model's number
    `first_layer`; None if layers of several components have no common order. `drafts`: a draft model may still compute
    its rows of the last token when the step reports its end.
    """

    caches: Sequence[ComponentCache]
    fleet: Fleet
    transfers: RequestTransfers
    offload: OffloadWorker | None
    mark: Mark
    layers: Sequence[str] | None
    first_layer: int = 0
    layer_wise: int = 0
    drafts: bool = False
    told: Tell = field(default_factory=lambda: FailureLog().failed)
    counts: Counter[str] = field(default_factory=Counter[str])
    _settled: KvmoverConnectorMetadata | None = None
    _computing: list[Computing] = field(default_factory=list[Computing])
    _fetching: dict[str, ReceiveSpec] = field(default_factory=dict[str, ReceiveSpec])
    _delayed: set[str] = field(default_factory=set[str])
    _quarantined: set[str] = field(default_factory=set[str])
    _movable: set[str] = field(default_factory=set[str])
    _endings: list[RankEnding] = field(default_factory=list[RankEnding])

    def before(self, metadata: KvmoverConnectorMetadata) -> None:
        """Return when pages of preempted requests are not read any more; the step will overwrite them."""
        self._settled = metadata
        for abort in metadata.aborts:
            if abort.request in metadata.preempted:
                self.transfers.abort(abort.request, abort.reason)
        if metadata.preempted:
            for over in self.transfers.settle(sorted(metadata.preempted)):
                self._count("sent", over)
            if self.offload:
                self.offload.settle()

    def begin(self, metadata: KvmoverConnectorMetadata) -> None:
        """Begin a step: all orders that do not wait for its forward pass."""
        if self._settled is not metadata:  # a model runner that does not tell of preemptions
            self.before(metadata)
        self._settled = None
        self._delayed |= metadata.delayed
        for abort in metadata.aborts:
            if abort.request not in metadata.preempted:
                self.transfers.abort(abort.request, abort.reason)
        for refusal in metadata.refusals:
            self.transfers.refuse(refusal.transfer, refusal.reason)
        for send in metadata.sends:
            self._send(send)
        for attach in metadata.attaches:
            self.transfers.attach(attach.request, attach.payload)
        for growth in metadata.growths:
            pages, stop = self._pages(growth.tables), _positions(growth.stop)
            self._computing.append(Computing(growth.request, stop, pages, growth.contents))
        for receive in metadata.receives:
            self._fetching[receive.request] = receive
            self.transfers.receive(receive, self._pages(receive.tables))
        for release in metadata.releases:
            needed = [cache.entries(range(release.tokens), self.fleet).stop for cache in self.caches]
            self.transfers.release(release, needed)
        if self.offload:
            for load in metadata.loads:
                self.offload.load(load)

    def computed(self, layer: str) -> None:
        """Note that the forward pass has passed a layer."""
        if not self._computing or not self.layer_wise or self.layers is None or layer not in self.layers:
            return
        done = self.layers.index(layer) + 1
        if done % self.layer_wise == 0 and done < len(self.layers):
            self._produced(self.first_layer + done)

    def end(self, metadata: KvmoverConnectorMetadata) -> None:
        """Note that the forward pass of a step has been launched."""
        if self._computing:
            self._produced(ALL)
            self._computing = []
        if self.offload and metadata.saves:
            ready = self.mark()
            for save in metadata.saves:
                self.offload.save(save, ready)

    def ended(self) -> Ended:
        """Returns the requests that ended since the last call."""
        ended = Ended()
        for over in self.transfers.sent():
            self._count("sent", over)
        ended.returned |= self._quarantined.intersection(self.transfers.returned())
        self._quarantined -= ended.returned
        for over in self.transfers.received():
            self._received(over, ended)
        for load, done in self.offload.loaded() if self.offload else ():
            ended.received.add(load.request)
            self._failed(ended, load.request, {block for block, ok in zip(load.blocks, done, strict=True) if not ok})
        for request in list(self._delayed):
            if not self.transfers.is_sending(request) and not (self.offload and self.offload.is_saving(request)):
                self._delayed.remove(request)
                ended.sent.add(request)
        return ended

    def take_endings(self) -> list[RankEnding]:
        """Returns the endings of transfers on this rank since the last call; the scheduler counts whole requests."""
        taken, self._endings = self._endings, []
        return taken

    def take_counts(self) -> Counter[str]:
        """Returns the counts of bytes and blocks since the last call."""
        taken, self.counts = self.counts, Counter[str]()
        return taken + self.offload.take_counts() if self.offload else taken

    def rejoin(self, make: Callable[[], Transport], model: Model, space: Namespace | None, reason: str) -> bytes:
        """End open transfers for `reason`, and go on as `model`, with pages of `space` in the store, or without with
        None.

        Returns the rank's new card.
        """
        self.transfers.rejoin(make, model, reason)
        if self.offload:
            self.offload.become(space)
        return self.transfers.progress.card

    def close(self) -> None:
        """End the transfers, then the store."""
        self.transfers.close()
        if self.offload:
            self.offload.close()

    def _send(self, send: SendSpec) -> None:
        gates = [Gate(self.mark(), ALL, ALL)] if self.drafts else None
        if send.computed is not None:
            self._computing.append(Computing(send.request, _positions(send.stop), contents=send.contents))
            gates = [Gate(self.mark(), ALL, send.computed)] if send.computed else []
        if send.way == "moved":
            self._movable.add(send.request)
        self.transfers.send(send, self._pages(send.tables), gates)

    def _produced(self, layers: int) -> None:
        """Report that layers below `layers` of this step's chunks are in their pages once all launched work has been
        computed.
        """
        event = self.mark()
        for chunk in self._computing:
            self.transfers.produced(chunk.request, Gate(event, layers, chunk.stop), chunk.pages, chunk.contents)
            chunk.pages, chunk.contents = None, ()

    def _pages(self, tables: Tables) -> list[list[int]]:
        """Returns a page table a component: the kernels' pages of its group's blocks."""
        return [cache.pages(tables[cache.group]) for cache in self.caches]

    def _received(self, over: Over, ended: Ended) -> None:
        spec = self._fetching.pop(over.request, None)
        if spec is None:  # a release
            return
        self._count("received", over)
        ended.received.add(spec.request)
        if over.reason is None:
            return
        if over.is_quarantined:  # it cannot be computed into these blocks: all of it needs others
            self._quarantined.add(spec.request)
            ended.quarantined.add(spec.request)
            ended.failed.add(spec.request)
            return
        bad: set[int] = set()
        for cache, indices in zip(self.caches, over.incomplete(self._wanted(spec)), strict=True):
            bad |= {cache.block(spec.tables[cache.group], index) for index in indices}
        self._failed(ended, spec.request, bad)

    def _wanted(self, spec: ReceiveSpec) -> list[range]:
        """Returns the indices into each page table of everything that was asked for."""
        return [cache.entries(range(spec.start, spec.stop), self.fleet) for cache in self.caches]

    def _failed(self, ended: Ended, request: str, blocks: set[int]) -> None:
        """Note failed blocks. With several groups, whose blocks have the same numbers, the request fails as a whole; so
        does one that lost a state, which only all of its tokens restore.
        """
        if len({cache.group for cache in self.caches}) == 1 and not any(c.component.states for c in self.caches):
            ended.blocks |= blocks
        elif blocks:
            ended.failed.add(request)

    def _count(self, way: str, over: Over) -> None:
        if way == "sent" and over.request in self._movable:
            self._given(over)
            return
        if over.reason is not None:
            self.told(way, over)
        if over.result is None:
            self.transfers.never_began("send" if way == "sent" else "receive")
        landed = over.result if over.reason is None else None
        microseconds = round(landed.seconds * 1e6) if landed else 0
        self._endings.append(RankEnding(way, over.request, landed is not None, microseconds))
        if landed and landed.nbytes:
            self.counts[f"{way}_bytes"] += landed.nbytes

    def _given(self, over: Over) -> None:
        """Count a request that might have moved. Staying is no failure, and copies of it have landed."""
        self._movable.remove(over.request)
        stayed = over.result is not None and over.result.cause in (Cause.ABORTED, Cause.DEADLINE)
        if over.reason is not None and not stayed:
            self.told("sent", over)
        self._endings.append(RankEnding("moved", over.request, over.reason is None, 0))
        if over.result is not None:
            self.counts["sent_bytes"] += over.result.nbytes


def _positions(stop: int | None) -> int:
    """Returns the position below which all is computed; None stands for the whole request."""
    return ALL if stop is None else stop
