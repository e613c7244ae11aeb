"""What engines do with movers: they offer and ask for requests, compute, give up, and use their pages again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from kvmover.errors import PeerUnknown, PlanError
from kvmover.transfer.result import Gate, Service
from tests.sim.geometry import PAGES, Index
from tests.sim.scenario import Step
from tests.sim.scene import Broken, Scene
from tests.sim.seats import Order, Passing, Request, Seat


@dataclass(slots=True, eq=False)
class Engines:
    """The engines of a scene. `look` checks a rank, after every call of its mover."""

    scene: Scene
    random: Random
    filler: np.random.Generator
    look: Callable[[Seat], None]

    def order_all(self, request: Request, engine: str, delay: float) -> None:
        """Every rank of an engine gets its call, not quite at once; where two engines ask, their ranks ask by turns."""
        apart_s = 0.02 if request.asked.other_s is None else 0.6
        for rank in range(self.scene.scenario.fleets[engine].size):
            late = delay + self.random.uniform(0, apart_s)
            self.scene.network.after(late, lambda r=rank: self._order(request, engine, r))

    def _order(self, request: Request, engine: str, rank: int) -> None:
        seat = self.scene.at[engine, rank]
        if not seat.alive:
            return
        if engine == "p" and request.asked.refused and request.retries == request.asked.retries:
            self.scene.seen["refused"] += 1
            seat.mover.refuse(request.name, "refused by the engine")
            return
        pages = seat.take(self.scene.scenario, request.asked.tokens)
        if pages is None:
            return
        numbers = [page + number * PAGES for number, table in enumerate(pages) for page in table.tolist()]
        try:
            order = (self._send if engine == "p" else self._receive)(request, seat, pages, numbers)
        except (PlanError, PeerUnknown) as error:  # it runs already, or a peer is down: nothing was asked
            self.scene.network.log(lambda e=error: f"{seat.name}: {engine} {request.name} refused: {e}")
            if self.scene.calm:
                raise Broken(f"{seat.name}: {request.name} was refused though nothing went wrong: {error}") from error
            return
        self.scene.network.log(lambda: f"{order.name}, pages {[table.tolist() for table in pages]}")
        for free, table in zip(seat.free, pages, strict=True):
            del free[: len(table)]
        self.scene.orders.append(order)
        seat.orders.append(order)
        self.look(seat)

    def _receive(self, request: Request, seat: Seat, pages: tuple[Index, ...], numbers: list[int]) -> Order:
        asked = request.asked
        wanted, tables = range(asked.start, asked.tokens), None if asked.allocated else pages
        transfer = seat.mover.receive(request.name, "p", wanted, tables, asked.aux_from, asked.deadline_s)
        order = Order("receive", request, seat, pages, numbers, transfer, seat.mover._destination.generation)
        request.received[seat.place.seat] += 1
        if tables is not None:
            order.named = [len(table) for table in tables]
            seat.open_to.update(dict.fromkeys(numbers, order))
            return order
        order.named = [0] * len(pages)
        for seconds, share in asked.allocated:
            self.scene.network.after(seconds, lambda share=share: self._allocated(order, share))
        return order

    def _allocated(self, order: Order, share: float) -> None:
        """What is named from here on may be written, and nothing before."""
        seat = order.seat
        if order.closed or order.transfer.ended or not seat.alive:
            return
        tables = order.part(share)
        numbers = (page + number * PAGES for number, table in enumerate(tables) for page in table.tolist())
        seat.open_to.update(dict.fromkeys(numbers, order))
        self.scene.network.log(lambda: f"{order.name}: has pages {[table.tolist() for table in tables]} too")
        seat.mover.allocated(order.transfer, tables)
        self.look(seat)

    def _send(self, request: Request, seat: Seat, pages: tuple[Index, ...], numbers: list[int]) -> Order:
        asked, rank = request.asked, seat.place.rank
        payload = f"{request.name} {len(self.scene.orders)}".encode() if rank in asked.aux_from else None
        gates = [Gate(Passing(), step.layers, step.tokens) for step in asked.steps]
        said = gates[: self.random.choice([0, 1, len(gates)])]
        now, later = (None, payload) if asked.aux_s else (payload, None)
        # What is in the pages is laid there first: the mover may act within the call.
        order = Order("send", request, seat, pages, numbers, None, named=[0] * len(pages))
        if not gates:
            seat.put((seat.memory, seat.expected), order, Step(0.0))
            order.computed.append(Step(0.0))
        order.waited = {place.engine for place, *_ in seat.mover.waiting(request.name)}
        first, *shares = asked.named or (1.0,) * (len(gates) + 1)
        order.transfer = seat.mover.send(
            request.name,
            order.part(first),
            said if gates else None,
            now,
            asked.deadline_s,
            self.scene.scenario.service,
        )
        for gate, step, share in zip(gates, asked.steps, shares, strict=True):
            self.scene.network.after(
                step.seconds,
                lambda g=gate, s=step, told=gate in said, share=share: self._computed(order, g, s, told, share),
            )
        if payload is not None:
            request.payloads.setdefault(rank, set()).add(payload)
        if later is not None:
            self.scene.network.after(asked.aux_s, lambda: self._attach(order, later))
        return order

    def _computed(self, order: Order, gate: Gate, step: Step, told: bool, share: float) -> None:
        seat = order.seat
        if order.closed or not seat.alive:
            return
        self.scene.network.log(lambda: f"{order.name}: computed {step}")
        seat.put((seat.memory, seat.expected), order, step)
        assert isinstance(gate.event, Passing)
        gate.event.passed = True
        order.computed.append(step)
        pages = order.part(share) if order.request.asked.named else None
        if not told:
            seat.mover.produced(order.transfer, gate, pages)
        elif pages is not None:  # its gate is known, and may have passed: a gate for nothing brings the pages
            seat.mover.produced(order.transfer, Gate(None, 0, 0), pages)

    def _attach(self, order: Order, payload: bytes) -> None:
        if order.seat.alive and not order.closed:
            order.seat.mover.attach(order.transfer, payload)
            self.look(order.seat)

    def abort(self, request: Request, engine: str) -> None:
        for order in [o for o in self.scene.orders if o.request is request and o.seat.place.engine == engine]:
            if order.seat.alive and not order.transfer.ended:
                self.scene.network.log(lambda o=order: f"{o.name}: abort")
                order.seat.mover.abort(order.transfer, "the user left")
                self.look(order.seat)

    def closed(self, order: Order) -> None:
        """The engine has its pages back, and uses them for something else."""
        order.closed = True
        seat, request = order.seat, order.request
        seat.orders.remove(order)
        if order.verb == "send":
            self._recycle(order)
            return
        for page in order.numbers:
            seat.open_to.pop(page, None)
        assert order.transfer.result is not None
        landed = order.transfer.result.landed
        if landed:
            self.scene.network.after(self.random.uniform(0, 0.2), lambda: self._recycle(order))
        else:
            self._recycle(order)
        if request.retries > 0 and (request.asked.again or not landed):
            self._ask_again(request, seat.place.engine, landed)

    def _ask_again(self, request: Request, engine: str, landed: bool) -> None:
        """All begin anew; where a prefill gives repeatedly, an engine asks alone, when all its ranks have ended."""
        scenario = self.scene.scenario
        once = scenario.service is Service.ONCE
        theirs = [o for o in self.scene.orders if o.request is request and o.seat.place.engine == engine]
        whole = len(theirs) % scenario.fleets[engine].size == 0
        if not once and not (whole and all(order.closed for order in theirs)):
            return
        request.retries -= 1
        delay = self.random.choice([0.0, self.random.uniform(0, 0.3)]) + 0.2 * landed
        for each in request.asked.begins if once else (engine,):
            self.order_all(request, each, delay)

    def _recycle(self, order: Order) -> None:
        """Other bytes in the same pages: a late write shows, and so does a late read."""
        seat = order.seat
        if not seat.alive:
            return
        mine = seat.geometry.bytes_of(order.numbers)
        seat.memory[mine] = seat.expected[mine] = self.filler.integers(0, 256, len(mine), np.uint8)
        for free, table in zip(seat.free, order.pages, strict=True):
            free[:0] = table.tolist()  # used first: the next request gets them at once
