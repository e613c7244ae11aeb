"""Worker: the connector's half beside the model. It carries the scheduler's orders out and tells how they ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmover.engines.vllm.block_store import Event, Keeper
from kvmover.engines.vllm.caches import Sheaf
from kvmover.engines.vllm.connector_metadata import Orders, Receive, Send, Tables
from kvmover.engines.vllm.tally import RankEnding
from kvmover.engines.vllm.transfers import Over, Traffic
from kvmover.transfer.result import ALL, Cause, Gate

log = logging.getLogger(__name__)


class Mark(Protocol):
    """Record an event behind all that was computed so far."""

    def __call__(self) -> Event: ...


class Tell(Protocol):
    """Tell that a transfer failed, `way` "sent" or "received"."""

    def __call__(self, way: str, over: Over) -> None: ...


def failed(way: str, over: Over) -> None:
    """Whichever it was. What the engine itself gave up is no warning."""
    given_up = over.result is not None and over.result.cause is Cause.ABORTED
    log.log(logging.INFO if given_up else logging.WARNING, "%s was not %s: %s", over.request, way, over.reason)


def unbegun(way: str, over: Over) -> None:
    """One that never began: of the others the mover's watchers tell."""
    if over.result is None:
        failed(way, over)


@dataclass(slots=True)
class Ended:
    """Requests of which nothing is read any more, of which nothing is written any more, and of these the failed ones.
    `blocks`: those that are not whole, where a block id says whose it is."""

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    blocks: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class Worker:
    """A rank. `layers`: names of the model's layers whose caches it holds, in order, the first of which is number
    `first_layer` of the model; None where layers of several components make no one order."""

    sheaves: Sequence[Sheaf]
    traffic: Traffic
    keeper: Keeper | None
    mark: Mark
    layers: Sequence[str] | None
    first_layer: int = 0
    layer_wise: int = 0
    told: Tell = failed
    counts: Counter[str] = field(default_factory=Counter[str])
    _settled: Orders | None = None
    _computing: list[Send] = field(default_factory=list[Send])
    _fetching: dict[str, Receive] = field(default_factory=dict[str, Receive])
    _delayed: set[str] = field(default_factory=set[str])
    _endings: list[RankEnding] = field(default_factory=list[RankEnding])

    def before(self, orders: Orders) -> None:
        """Before pages of preempted requests are overwritten: nothing reads them when this returns."""
        self._settled = orders
        for abort in orders.aborts:
            if abort.request in orders.preempted:
                self.traffic.abort(abort.request, abort.reason)
        if orders.preempted:
            for over in self.traffic.settle(sorted(orders.preempted)):
                self._count("sent", over)
            if self.keeper:
                self.keeper.settle()

    def begin(self, orders: Orders) -> None:
        """A step begins: what does not wait for its forward pass."""
        if self._settled is not orders:  # a model runner that does not tell of preemptions
            self.before(orders)
        self._settled = None
        self._delayed |= orders.delayed
        for abort in orders.aborts:
            if abort.request not in orders.preempted:
                self.traffic.abort(abort.request, abort.reason)
        for refusal in orders.refusals:
            self.traffic.refuse(refusal.transfer, refusal.reason)
        for send in orders.sends:
            self._send(send)
        for receive in orders.receives:
            self._fetching[receive.request] = receive
            self.traffic.receive(receive, self._pages(receive.tables))
        for release in orders.releases:
            self.traffic.release(release, len(self.sheaves), self.sheaves[0].spec.page_tokens)
        if self.keeper:
            for load in orders.loads:
                self.keeper.load(load)

    def computed(self, layer: str) -> None:
        """The forward pass has come past a layer."""
        if not self._computing or not self.layer_wise or self.layers is None or layer not in self.layers:
            return
        done = self.layers.index(layer) + 1
        if done % self.layer_wise == 0 and done < len(self.layers):
            gate = Gate(self.mark(), self.first_layer + done)
            for send in self._computing:
                self.traffic.produced(send.request, gate)

    def end(self, orders: Orders) -> None:
        """The forward pass of a step has been launched."""
        if self._computing:
            gate = Gate(self.mark())
            for send in self._computing:
                self.traffic.produced(send.request, gate)
            self._computing = []
        if self.keeper and orders.saves:
            ready = self.mark()
            for save in orders.saves:
                self.keeper.save(save, ready)

    def ended(self) -> Ended:
        """What has ended since the last call."""
        ended = Ended()
        for over in self.traffic.sent():
            self._count("sent", over)
        for over in self.traffic.received():
            self._received(over, ended)
        for load, done in self.keeper.loaded() if self.keeper else ():
            ended.received.add(load.request)
            self._failed(ended, load.request, {block for block, ok in zip(load.blocks, done, strict=True) if not ok})
        for request in list(self._delayed):
            if not self.traffic.is_sending(request) and not (self.keeper and self.keeper.is_saving(request)):
                self._delayed.remove(request)
                ended.sent.add(request)
        return ended

    def take_endings(self) -> list[RankEnding]:
        """How transfers ended on this rank since the last call, of whole requests the scheduler's to count."""
        taken, self._endings = self._endings, []
        return taken

    def take_counts(self) -> Counter[str]:
        """What was counted since the last call: bytes and blocks."""
        taken, self.counts = self.counts, Counter[str]()
        return taken + self.keeper.take_counts() if self.keeper else taken

    def close(self) -> None:
        self.traffic.close()
        if self.keeper:
            self.keeper.close()

    def _send(self, send: Send) -> None:
        gates = None
        if send.computed is not None:
            self._computing.append(send)
            gates = [Gate(self.mark(), ALL, send.computed)] if send.computed else []
        self.traffic.send(send.request, send.transfer, self._pages(send.tables), gates)

    def _pages(self, tables: Tables) -> list[list[int]]:
        """A page table a component: pages of the kernels, of the blocks of its group."""
        return [
            [block * sheaf.ratio + page for block in tables[sheaf.group] for page in range(sheaf.ratio)]
            for sheaf in self.sheaves
        ]

    def _received(self, over: Over, ended: Ended) -> None:
        order = self._fetching.pop(over.request, None)
        if order is None:  # a release
            return
        self._count("received", over)
        ended.received.add(order.request)
        if over.reason is None:
            return
        bad: set[int] = set()
        for sheaf, indices in zip(self.sheaves, over.incomplete(self._wanted(order)), strict=True):
            bad |= {order.tables[sheaf.group][index // sheaf.ratio] for index in indices}
        self._failed(ended, order.request, bad)

    def _wanted(self, order: Receive) -> list[range]:
        """Indices into each page table of all that was asked for."""
        tokens = self.sheaves[0].spec.page_tokens
        return [range(order.start // tokens, -(-order.stop // tokens))] * len(self.sheaves)

    def _failed(self, ended: Ended, request: str, blocks: set[int]) -> None:
        """Blocks of several groups have the same numbers: then the request fails as a whole."""
        if len({sheaf.group for sheaf in self.sheaves}) == 1:
            ended.blocks |= blocks
        elif blocks:
            ended.failed.add(request)

    def _count(self, way: str, over: Over) -> None:
        if over.reason is not None:
            self.told(way, over)
        landed = over.result if over.reason is None else None
        microseconds = round(landed.seconds * 1e6) if landed else 0
        self._endings.append(RankEnding(way, over.request, landed is not None, microseconds))
        if landed and landed.nbytes:
            self.counts[f"{way}_bytes"] += landed.nbytes
