"""A play is whole movers on a virtual wire of which each next event is chosen: heard, lost, landed, polled, waited."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import numpy as np

from kvmover.errors import PeerReplaced
from kvmover.transfer.core import Timer, TimerKind, Timers
from kvmover.transfer.mover import Mover
from tests.sim import endings, planned, steps
from tests.sim.engines import Engines
from tests.sim.flights import Flights
from tests.sim.left import left
from tests.sim.network import messages_of
from tests.sim.scenario import Profile, linked
from tests.sim.scene import Scene
from tests.sim.seats import Request, Seat, seated
from tests.states.chosen_network import Channel, Choice, ChosenNetwork, Ticket
from tests.states.outcome import check_outcome
from tests.states.picture import Painter, contents_of, places_of, state
from tests.states.stages import FAULTS, Stage

#: Timers that end nothing: a play does not wait for them alone.
IDLE_TIMERS = (TimerKind.TOMBSTONES,)


class Ink:
    """Bytes of pages that are used for something else: always the same, so that no order of calls decides them."""

    def integers(self, low: int, high: int, count: int, kind: type) -> np.ndarray[Any, Any]:
        return np.full(count, 0x5A, kind)


@dataclass(slots=True, eq=False)
class Play:
    """A run of a stage: it begins when all processes have greeted each other, and its opening is over.

    `spent`: faults so far. `woken`: processes to poll; `stopped`: processes that are not polled, and `gone`: ranks that
    crashed. `slow`: channels and operations that may take longer than anything else. `to_call`: ranks to begin.
    """

    stage: Stage
    network: ChosenNetwork = field(default_factory=ChosenNetwork)
    scene: Scene = field(init=False)
    flights: Flights = field(init=False)
    engines: Engines = field(init=False)
    request: Request = field(init=False)
    woken: dict[str, None] = field(default_factory=dict[str, None])
    stopped: set[str] = field(default_factory=set[str])
    gone: list[tuple[str, int]] = field(default_factory=list["tuple[str, int]"])
    slow: set[Channel | Ticket] = field(default_factory=set["Channel | Ticket"])
    spent: Counter[str] = field(default_factory=Counter[str])
    to_call: list[tuple[str, int]] = field(default_factory=list["tuple[str, int]"])

    def __post_init__(self) -> None:
        planned.keep()
        scenario, network, faults = self.stage.scenario, self.network, self.stage.allowed
        wire = Profile(self.stage.name, ordered="overtake" not in faults, loss=float("lose" in faults))
        self.scene = Scene(scenario, wire, network)
        self.flights = Flights(self.scene)
        self.engines = Engines(self.scene, Random(0), cast(np.random.Generator, Ink()), self._look)
        network.wake = lambda name: self.woken.update({name: None})
        network.on_post, network.on_landing = self.flights.posted, self.flights.landing
        network.on_end = self.flights.ended
        self.request = Request.of(scenario.requests[0], scenario.components, np.random.default_rng(7))
        ranks = [(engine, rank) for engine, fleet in scenario.fleets.items() for rank in range(fleet.size)]
        for each in ranks:
            self._start(*each)
        self._settle()
        self.to_call = ranks
        for choice in self.stage.opening:
            self.act(choice)
            self._settle()

    def _settle(self) -> None:
        """Let all be heard, in one order."""
        while prompt := [choice for choice in self._prompt() if choice[0] in ("poll", "hear")]:
            self.act(prompt[0])

    def _start(self, engine: str, rank: int) -> None:
        births = self.network.births(f"{engine}{rank}")
        noise = Random(f"{engine}{rank}.{births}"), np.random.default_rng([ord(engine), rank, births])
        made = seated(self.scene.scenario, self.network, engine, rank, noise, self.scene.seats)
        self.network.log(lambda: f"{made.name}: starts")
        self.scene.seats[made.name] = self.scene.at[engine, rank] = made
        for staging in (made.mover._core.outgoing, made.mover._core.incoming):
            staging.tensor.zero_()
        for other in self.scene.at.values():
            if linked(other.place.engine, engine) and other.alive:
                try:
                    made.mover.connect(other.mover.card)
                except PeerReplaced:
                    continue
        self.woken[made.name] = None

    @property
    def names(self) -> list[str]:
        """The processes, by name."""
        return list(self.scene.seats)

    # Choices.

    def choices(self) -> list[Choice]:
        """Returns all that may happen next. No time passes while something could happen that is not slow."""
        prompt = list(self._prompt())
        found = [*prompt, *self._faults(prompt), *self._slow_ones()]
        if not prompt and self._due_s() <= self._latest_s():
            found.append(("wait",))
        return found

    def _prompt(self) -> Iterator[Choice]:
        network = self.network
        yield from (("poll", name) for name in self.woken if name not in self.stopped)
        yield from (("call", *each) for each in self.to_call)
        yield from (("name", *each) for each in network.put_off)
        yield from (choice for choice in network.prompt() if choice[0] == "told" or choice[1:] not in self.slow)

    def _slow_ones(self) -> Iterator[Choice]:
        for each in sorted(self.slow, key=str):
            yield "land" if each in self.network.flying else "hear", *each
        yield from (("go", name) for name in sorted(self.stopped))
        yield from (("replace", *each) for each in self.gone)

    def _faults(self, prompt: list[Choice]) -> Iterator[Choice]:
        """The faults that may come now, of those that are allowed and not spent."""
        allowed = self.stage.allowed
        may = {kind for kind in FAULTS if self.spent[kind] < allowed.get(kind, 0)}
        for kind, *rest in prompt:
            if kind == "hear":
                yield from ((fault, *rest) for fault in ("lose", "repeat", "delay", "gather") if fault in may)
                if "overtake" in may and len(self.network.channels[cast(Channel, tuple(rest))]) > 1:
                    yield "overtake", *rest
            elif kind == "land" and "late" in may:
                yield "late", *rest
        for seat in self.scene.alive:
            if "stop" in may and seat.name in self.woken and not self.stopped:
                yield "stop", seat.name
            for fault in ("crash", "kill"):
                if fault in may and not self.to_call:
                    yield fault, *seat.place.seat
            if "abort" in may and any(not order.transfer.ended for order in seat.orders):
                yield "abort", *seat.place.seat

    def _due_s(self) -> float:
        """When a process that runs has something to do next."""
        return min((self._due_at(seat) for seat in self.scene.alive if seat.name not in self.stopped), default=math.inf)

    @staticmethod
    def _due_at(seat: Seat) -> float:
        times = due_times(seat.mover)
        times += [flight.deadline for flight in seat.transport._flights.values() if not flight.told]
        return min(times, default=math.inf)

    def _latest_s(self) -> float:
        """Until when no operation has to land: none takes longer than what lingers of a lease."""
        posted = [self.network.posted_s[ticket] for ticket in self.network.flying]
        return min(posted, default=sys.float_info.max) + self.scene.scenario.config.linger_s

    # Acts.

    def act(self, choice: Choice) -> None:
        """Let a choice happen. Raises Broken when a property does not hold after it."""
        kind, *rest = choice
        if kind in FAULTS:
            self.spent[str(kind)] += 1
        getattr(self, f"_{kind}")(*rest)
        for seat in self.scene.alive:
            in_one_order(seat.mover._core.timers)
        if self.scene.orders and self.is_over:
            check_outcome(self.scene, self.spent.keys())

    def _poll(self, name: str) -> None:
        seat = self.scene.seats[name]
        self.woken.pop(name, None)
        if steps.polled(seat) and has_more(seat.mover):
            self.woken[name] = None
        self._look(seat)

    def _poll_woken(self, name: str) -> None:
        if name in self.woken and name not in self.stopped:
            self._poll(name)

    def _call(self, engine: str, rank: int) -> None:
        self.to_call.remove((engine, rank))
        self.network.caller = engine, rank
        self.engines._order(self.request, engine, rank)
        self.woken[self.scene.at[engine, rank].name] = None

    def _name(self, engine: str, rank: int) -> None:
        """Let a rank name more of its pages, or compute more of its tokens."""
        calls = self.network.put_off[engine, rank]
        calls.popleft()()
        if not calls:
            del self.network.put_off[engine, rank]
        self.woken[self.scene.at[engine, rank].name] = None

    def _hear(self, sender: str, peer: str) -> None:
        self._gather(sender, peer)
        self._poll_woken(peer)

    def _gather(self, sender: str, peer: str) -> None:
        """Deliver a note to a process that is polled later, perhaps with others."""
        self.slow.discard((sender, peer))
        self.network.deliver((sender, peer), 0)

    def _lose(self, sender: str, peer: str) -> None:
        self.network.lose((sender, peer))

    def _repeat(self, sender: str, peer: str) -> None:
        self.network.repeat((sender, peer))
        self._hear(sender, peer)

    def _overtake(self, sender: str, peer: str) -> None:
        self.network.deliver((sender, peer), 1)
        self._poll_woken(peer)

    def _delay(self, sender: str, peer: str) -> None:
        self.slow.add((sender, peer))

    def _late(self, *ticket: *Ticket) -> None:
        self.slow.add(ticket)

    def _land(self, *ticket: *Ticket) -> None:
        self.slow.discard(ticket)
        target = self.flights.targets[self.network.flying[ticket]].seat
        self.network.land(ticket)
        if target.alive:
            self._look(target)

    def _told(self, *ticket: *Ticket) -> None:
        self.network.tell_end(ticket)
        self._poll_woken(ticket[0])

    def _stop(self, name: str) -> None:
        self.network.log(lambda: f"{name}: STOPPED")
        self.stopped.add(name)

    def _go(self, name: str) -> None:
        self.network.log(lambda: f"{name}: GOES ON")
        self.stopped.discard(name)
        self.woken[name] = None

    def _abort(self, engine: str, rank: int) -> None:
        seat = self.scene.at[engine, rank]
        self.network.log(lambda: f"{seat.name}: abort")
        for order in [order for order in seat.orders if not order.transfer.ended]:
            seat.mover.abort(order.transfer, "the user left")
        self.woken[seat.name] = None
        self._look(seat)

    def _crash(self, engine: str, rank: int) -> None:
        """Let a process die, of which its peers are not told."""
        self._die(engine, rank, told=False)

    def _kill(self, engine: str, rank: int) -> None:
        """Let a process die, of which the transport tells its peers."""
        self._die(engine, rank, told=True)

    def _die(self, engine: str, rank: int, told: bool) -> None:
        seat = self.scene.at[engine, rank]
        self.network.log(lambda: f"{seat.name}: CRASH")
        seat.alive = False
        self.network.crash(seat.name, told)
        self.network.put_off.pop((engine, rank), None)
        self.woken.pop(seat.name, None)
        self.stopped.discard(seat.name)
        self.slow = {each for each in self.slow if seat.name not in each or each in self.network.flying}
        self.gone.append((engine, rank))

    def _replace(self, engine: str, rank: int) -> None:
        """Let another process take the place of one that died."""
        self.gone.remove((engine, rank))
        self._start(engine, rank)

    def _wait(self) -> None:
        """Let time pass until something is due."""
        self.network.now = max(self.network.now, self._due_s())
        self.network.log(lambda: "time passes")
        self.woken.update({seat.name: None for seat in self.scene.alive if self._due_at(seat) <= self.network.now})

    # Properties.

    def _look(self, seat: Seat) -> None:
        """Check what holds after every act of a mover."""
        for posted in self.flights.into.get(seat.name, ()):
            self.flights.still_its_own(posted)
        steps.check_mover(self.scene, seat)
        for order in list(seat.orders):
            result = order.transfer.result
            if result is not None and endings.given_back(self.scene, self.flights, order, result):
                self.engines.closed(order)

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way, every transfer has ended, and nothing is left of any."""
        network = self.network
        under_way = self.to_call or self.stopped or self.slow or self.woken or self.gone
        if under_way or network.put_off or network.channels or network.in_flight or network.settling:
            return False
        return all(order.transfer.ended for seat in self.scene.alive for order in seat.orders) and not left(self.scene)

    # The picture.

    def picture(self) -> str:
        """Returns the picture of all movers, of the wire, and of what the properties look at."""
        network, places = self.network, places_of(seat.mover for seat in self.scene.seats.values())
        painter = Painter(network.now, places)
        for pair in sorted(network.channels):
            painter.paint((pair, pair in self.slow, [messages_of(note) for note in network.channels[pair]]))
        for ticket, posted in sorted(network.flying.items()):
            shut_out = network.is_revoked(posted)
            painter.paint((ticket, ticket in self.slow, network.posted_s[ticket], posted.flight.told, shut_out))
        painter.paint((sorted(network.settling), sorted(self.woken), self.stopped, self.gone, sorted(self.to_call)))
        painter.paint(sorted((each, len(calls)) for each, calls in network.put_off.items()))
        painter.paint((sorted(self.spent.items()), sorted(network._dead)))
        for order in sorted(self.scene.orders, key=lambda order: order.name):
            result = order.transfer.result
            ended = None if result is None else (result.reason, result.cause, result.quarantined)
            painter.paint((order.name, order.closed, order.named, order.waited, order.transfer.quarantined, ended))
        for seat in self.scene.alive:
            painter.paint((sorted(seat.open_to), seat.free, seat.transport.inbox, contents_of(seat.mover)))
        return "\n".join([painter.text(), *(state(seat.mover, network.now, places) for seat in self.scene.alive)])


def has_more(mover: Mover) -> bool:
    """Returns True if a mover that was busy goes on at its next poll, whatever it hears."""
    return bool(mover._writes._queue or mover._events or mover._core.losses or mover._core.later)


def due_times(mover: Mover) -> list[float]:
    """Returns the times of a mover's timers that end something."""
    return [at for (kind, _), at in mover._core.timers._due.items() if kind not in IDLE_TIMERS]


def in_one_order(timers: Timers[Timer]) -> None:
    """Let timers that are due at one time come in the order of their names: real times are never equal."""
    timers._due = dict(sorted(timers._due.items(), key=lambda item: repr(item[0])))
    timers._rebuild()
