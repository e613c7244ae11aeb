"""A prefill and one or two decode engines under a seeded schedule of requests and faults, checked after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np

from kvmover.errors import KvmoverError, PeerReplaced
from kvmover.transfer.meter import Count
from tests.sim import endings, planned, steps
from tests.sim.copies import Touched
from tests.sim.engines import Engines
from tests.sim.flights import Flights
from tests.sim.left import left
from tests.sim.network import Posted, SimNetwork
from tests.sim.scenario import CALM_S, LOSSY, Asked, Crash, Cut, Fault, Replace, Scenario, Stop, linked, profile_of
from tests.sim.scene import Broken, Scene
from tests.sim.seats import Request, Seat, seated

__all__ = ["Broken", "World", "simulate"]

#: Between polls of a rank with nothing to do, and with an open transfer.
IDLE_S, BUSY_S = 0.4, 0.08
#: No schedule is longer than this in virtual time: what is still open then never ends. Copies that were queued end by
#: themselves, 5 s each at worst: it may take so long after the last, but not for ever.
HORIZON_S, AFTER_COPIES_S, SLOW_HORIZON_S = 30.0, 10.0, 300.0
#: Between what `recover` does: longer than a lost peer waits for its next dial.
MEETING_S = 2.0
#: No schedule has so much under way at once, unless every answer is answered.
CROWD = 2000


class World:
    """One schedule. `run` raises Broken at the first step after which an invariant does not hold."""

    def __init__(self, seed: int, profile: str = "default", trace: bool = False) -> None:
        planned.keep()
        self.random = Random(f"world {seed}")
        self.filler = np.random.default_rng(seed)
        wire = profile_of(profile, seed)
        self.scenario = scenario = Scenario.draw(seed, wire)
        self.network = SimNetwork(seed, replace(wire, late=0.0, late_reads=0.0) if scenario.calm else wire)
        self.network.trace = [] if trace else None
        self.network.wake = self._wake
        self.network.spoils = scenario.digests
        self.polls = 0
        self.scene = Scene(scenario, wire, self.network)
        self.flights = Flights(self.scene)
        self.engines = Engines(self.scene, self.random, self.filler, self._look)
        self.requests: dict[str, Request] = {}
        self.network.on_say = steps.Chatter(self.scene).check
        self.network.on_post, self.network.on_landing = self._posted, self.flights.landing
        self.network.on_end = self.flights.ended
        self.network.log(lambda: f"{scenario}")
        for engine, fleet in scenario.fleets.items():
            for rank in range(fleet.size):
                self._start(engine, rank)
        for asked in scenario.requests:
            request = self.requests[asked.name] = Request.of(asked, scenario.components, self.filler)
            for engine, begin in asked.begins.items():
                self.engines.order_all(request, engine, begin)
            if asked.abort is not None:
                engine, at = asked.abort
                self.network.after(at, lambda r=request, e=engine: self.engines.abort(r, e))
        for fault in scenario.faults:
            self.network.after(fault.at_s, lambda f=fault: self._fault(f))

    @property
    def seen(self) -> Counter[str]:
        """Which situations were reached, and how often."""
        return self.scene.seen

    def run(self) -> World:
        self._run_until_quiet()
        self._end()
        return self

    def recover(self) -> World:
        """Run, end all faults, and ask for one request more: whatever was, it must land."""
        self._run_until_quiet()
        network, scene = self.network, self.scene
        network.profile = scene.profile = replace(LOSSY, loss=0.0, corrupt=0.0)
        for one, other in map(sorted, list(network.apart)):
            network.heal(one, other)
        for place, seat in list(scene.at.items()):
            if not seat.alive:
                self._start(*place)
        network.after(MEETING_S, self._meet)
        asked = Asked("last", 8, 0, (2 * MEETING_S, 2 * MEETING_S), deadline_s=CALM_S)
        request = self.requests[asked.name] = Request.of(asked, self.scenario.components, self.filler)
        for engine, begin in asked.begins.items():
            self.engines.order_all(request, engine, begin)
        network.after(3 * MEETING_S, lambda: None)  # not quiet before
        self._run_until_quiet()
        last = [order for order in scene.orders if order.request is request]
        if len(last) != sum(self.scenario.fleets[engine].size for engine in asked.begins):
            raise Broken(f"nothing is wrong any more, and only {len(last)} ranks began")
        for order in last:
            if order.transfer.result is None or not order.transfer.result.landed:
                raise Broken(f"nothing is wrong any more, and {order.name}: {order.transfer.result}")
        self._end()
        return self

    def _meet(self) -> None:
        """Everybody hears of everybody again, as a directory tells, who has been given up too. Who follows a process
        that was ahead of it waits until that one's seat is free.
        """
        for seat in self.scene.alive:
            for other in self.scene.alive:
                if linked(other.place.engine, seat.place.engine) and seat.mover._core.peers.get(other.name) is None:
                    try:
                        seat.mover.connect(other.mover.card)
                    except PeerReplaced:
                        if self.scenario.clocks == 1:
                            raise
                        self.network.after(MEETING_S / 4, self._meet)

    def _run_until_quiet(self) -> None:
        network, started = self.network, self.network.now
        until = started + HORIZON_S
        while not self._quiet():
            if network.now > until:
                busy_until = max((seat.busy_until for seat in self.scene.alive), default=started)
                until = max(until, min(busy_until + AFTER_COPIES_S, started + SLOW_HORIZON_S))
            if network.now > until:
                raise Broken(f"still busy after {network.now - started:.0f} s: {left(self.scene)}")
            if network.pending > CROWD:
                raise Broken(f"{network.pending} things are under way at once")
            network.step()

    # What goes wrong.

    def _posted(self, posted: Posted) -> None:
        """A source may give a request up just when a chunk of it is on its way."""
        self.flights.posted(posted)
        name = self.flights.targets[posted].request
        request = self.requests[name] if name else None
        if request is None:
            return
        if request.chunks == request.asked.ambush:
            self.seen["given up under a chunk"] += 1
            self.network.after(self.random.uniform(0, 0.02), lambda: self.engines.abort(request, "p"))
        request.chunks += 1

    def _fault(self, fault: Fault) -> None:
        network = self.network
        match fault:
            case Crash(rank, back_s=back_s, told=told, forgotten=forgotten):
                seat = self.scene.at[rank]
                if seat.alive:
                    self._kill(seat, told)
                    if back_s is not None:
                        network.after(back_s, lambda: self._start(*rank))
                    if forgotten:
                        self._forget(seat)
            case Stop(rank, seconds=seconds):
                seat = self.scene.at[rank]
                network.log(lambda: f"{seat.name}: STOPPED for {seconds:.3f} s")
                seat.stops.append((network.now, network.now + seconds))
            case Cut((source, target), seconds=seconds, told=told):
                one, other = self.scene.at["p", source].name, self.scene.at["d", target].name
                network.log(lambda: f"{one} and {other}: CUT OFF from each other, {seconds} s, told {told}")
                network.cut(one, other, told)
                if seconds is not None:
                    network.after(seconds, lambda: self._heal(one, other))
            case Replace((engine, number) as rank, after_s=after_s, seconds=seconds, told=told):
                old = self.scene.at[rank]
                others = [seat.name for seat in self.scene.alive if linked(seat.place.engine, engine)]
                network.log(lambda: f"{old.name}: CUT OFF from everybody for {seconds} s, told {told}")
                for other in others:
                    network.cut(old.name, other, told)
                    network.after(seconds, lambda other=other: self._heal(old.name, other))
                network.after(after_s, lambda: self._start(engine, number))
                if self.scenario.shared:  # what it may still copy into is kept while it lives
                    network.after(seconds + MEETING_S, lambda: self._kill(old, told))

    def _kill(self, seat: Seat, told: bool) -> None:
        self.network.log(lambda: f"{seat.name}: CRASH")
        seat.alive = False
        self.network.crash(seat.name, told)

    def _forget(self, dead: Seat) -> None:
        """Every rank that knew it is told of a death, as soon as nothing of the dead is under way."""
        if any(posted.sender is dead.transport for posted in self.network.in_flight):
            self.network.after(0.05, lambda: self._forget(dead))
            return
        for seat in self.scene.alive:
            if linked(seat.place.engine, dead.place.engine):
                self.network.log(lambda s=seat: f"{s.name}: is told that {dead.name} is dead")
                kept = len(seat.mover._destination.quarantine)
                seat.mover.forget(*dead.place.seat)
                self.seen["forgotten with memory kept"] += len(seat.mover._destination.quarantine) < kept
                steps.check_forgotten(seat, dead)
                self._look(seat)

    def _heal(self, one: str, other: str) -> None:
        self.network.log(lambda: f"{one} and {other}: reach each other again")
        self.network.heal(one, other)

    def _start(self, engine: str, rank: int) -> None:
        """A process that connects to every rank of another engine that is alive, and not a decode as it is."""
        made = seated(self.scenario, self.network, engine, rank, (self.random, self.filler), self.scene.seats)
        self.network.log(lambda: f"{made.name}: starts")
        self.scene.seats[made.name] = self.scene.at[engine, rank] = made
        for other in self.scene.at.values():
            if linked(other.place.engine, engine) and other.alive:
                made.mover.connect(other.mover.card)
        self._poll_in(made, BUSY_S)

    # Time.

    def _wake(self, name: str) -> None:
        seat = self.scene.seats[name]
        if seat.alive and not seat.waking:
            seat.waking = True
            self._poll_in(seat, 0.001 + seat.pace_s, again=False)

    def _poll_in(self, seat: Seat, seconds: float, again: bool = True) -> None:
        self.polls += 1
        self.network.after(seconds, lambda: self._poll(seat, again))

    def _poll(self, seat: Seat, again: bool) -> None:
        self.polls -= 1
        if not seat.alive:
            return
        until = seat.stopped_until(self.network.now)
        if until is not None:
            self._poll_in(seat, until - self.network.now + 1e-6, again)
            return
        if again:
            self._poll_in(seat, max(BUSY_S if seat.orders else IDLE_S, seat.pace_s))
        else:
            seat.waking = False
        busy = steps.polled(seat)
        if busy and seat.mover._writes._queue:  # there is more to do than one poll does
            self._wake(seat.name)
        self._look(seat)

    # The invariants.

    def _look(self, seat: Seat) -> None:
        """After every step of a mover."""
        for posted in self.flights.into.get(seat.name, ()):
            self.flights.still_its_own(posted)
        steps.check_mover(self.scene, seat)
        steps.check_silence(self.scene, seat)
        steps.check_quarantine(self.scene, seat)
        for order in list(seat.orders):
            if order.transfer.result is None:
                steps.check_deadline(self.scene, order)
            elif endings.given_back(self.scene, self.flights, order, order.transfer.result):
                self.engines.closed(order)

    def _quiet(self) -> bool:
        """Nothing is under way but heartbeats, every order has ended, and nothing is left that will pass."""
        if self.network.pending > self.polls or self.network.in_flight:
            return False
        ended = all(order.transfer.ended for seat in self.scene.alive for order in seat.orders)
        return ended and not left(self.scene)

    def _end(self) -> None:
        """Count what was reached; check what only the end can show."""
        endings.check_told(self.scene)
        meters = [seat.mover.meter.counts for seat in self.scene.seats.values()]
        self.seen["noted between newer releases"] += sum(seat.heard["Noted"] for seat in self.scene.seats.values())
        self.seen["slab renewed"] += sum(counts[Count.RENEWED_SLABS] for counts in meters)
        self.seen.update({f"lost {kind}": count for kind, count in self.network.lost.items()})
        for fault in self.scenario.faults:
            match fault:
                case Cut(seconds=seconds):
                    self.seen["cut for ever" if seconds is None else "cut and healed"] += 1
                case Replace():
                    self.seen["replaced and heard of again"] += 1
                case Crash(back_s=back_s):
                    self.seen["crashed for ever" if back_s is None else "crashed and came back"] += 1
                case Stop(seconds=seconds) if seconds > self.scenario.config.silence_s:
                    self.seen["stopped for longer than silence"] += 1


def simulate(seed: int, profile: str = "default", trace: bool = False) -> World:
    """Run one schedule. Raises Broken, with the command that shows it again."""
    world: World | None = None
    try:
        world = World(seed, profile, trace)
        return world.run()
    except (Broken, Touched, KvmoverError) as error:
        lines = "\n".join(world.network.trace or []) if world else ""
        replay = f"python -m tests.sim.replay {seed} {profile}"
        raise Broken(f"{lines}\nseed {seed}, profile {profile}: {error} (replay: {replay})") from error
