"""The invariants, checked after every step of a mover, at every landing, and at the end of a schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvmover.transfer import wire
from kvmover.transfer.lane import plans_between
from kvmover.transfer.result import Cause, Result
from kvmover.transfer.wire import Verb
from tests.sim.network import Posted, SimNetwork, text_of
from tests.sim.scenario import Crash, Cut, Profile, Scenario
from tests.sim.seats import Order, Request, Seat

#: A mover acts when it is polled: some heartbeats for what must happen one after the other.
SLACK_S = 0.5

#: Notes that say the same however often they are said.
KEEPALIVES = {wire.encode(wire.Ping()), wire.encode(wire.Pong())}


class Broken(AssertionError):
    """An invariant does not hold."""


#: An attempt and its chunk: (request, generation), (writer, chunk).
Owner = tuple[tuple[str, int], tuple[str, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where an operation will put its bytes: pages of orders, or a region of an arena and whose it is."""

    seat: Seat
    pages: tuple[tuple[int, Order], ...] = ()
    offset: int = -1
    owner: Owner | None = None

    @property
    def request(self) -> str | None:
        if self.pages:
            return self.pages[0][1].request.name
        return self.owner[0][0] if self.owner else None


@dataclass(slots=True, eq=False)
class Checks:
    """What must hold of a world. `spoilt`: how often an attempt's chunk landed with a wrong bit."""

    scenario: Scenario
    profile: Profile
    network: SimNetwork
    seats: dict[str, Seat]
    at: dict[tuple[str, int], Seat]
    orders: list[Order]
    seen: Counter[str]
    targets: dict[Posted, Target] = field(default_factory=dict[Posted, Target])
    into: dict[str, dict[Posted, None]] = field(default_factory=dict[str, "dict[Posted, None]"])
    spoilt: Counter[Owner] = field(default_factory=Counter[Owner])
    said: dict[tuple[str, str, bytes], tuple[float, int]] = field(default_factory=dict["tuple[str, str, bytes]", Any])

    def __post_init__(self) -> None:
        self.network.on_say = self._said
        self.network.on_landing = self._landing
        self.network.on_end = self._gone

    @property
    def calm(self) -> bool:
        """Nothing goes wrong in this schedule but what the protocol makes good."""
        return self.scenario.calm and self.profile.ordered

    # After a step.

    def after_step(self, seat: Seat) -> list[Order]:
        """The orders whose pages are the engine's again."""
        for posted in self.into.get(seat.name, ()):
            self._still_its_own(posted)
        self._memory(seat)
        self._arena(seat)
        self._silence(seat)
        closed = list[Order]()
        for order in seat.orders:
            if order.transfer.result is None:
                self._in_time(order)
            elif self._ended(order, order.transfer.result):
                closed.append(order)
        return closed

    def _in_time(self, order: Order) -> None:
        config, seat, started = self.scenario.config, order.seat, order.transfer.started
        late = self.network.now - started - config.deadline_s - config.drain_s
        if seat.mover._core.copier.busy:  # its own copies end by themselves, however long the queue of them is
            return
        if late > SLACK_S + 5 * seat.pace_s + seat.stalled_within(started, self.network.now):
            raise Broken(f"{order.name} is open after its deadline")

    def _silence(self, seat: Seat) -> None:
        """Nobody waits for a peer that cannot be reached for longer than it takes to notice."""
        if not self.scenario.faults or not seat.orders:
            return
        config, now = self.scenario.config, self.network.now
        bound = config.ping_s + config.silence_s + SLACK_S + 5 * seat.pace_s
        for peer in self._awaited(seat):
            since = self.network.unreachable_since(seat.name, peer)
            if since is None:
                since = next((a for a, b in self.seats[peer].stalls if a <= now < b), now)
            since = max(since, self.network.heard_at.get((peer, seat.name), 0.0))
            if now - since > bound + seat.stalled_within(since, now) and now - self._first(seat, peer) > bound:
                raise Broken(f"{seat.name} still waits for {peer}, which is silent since {since - 1000:.4f}")

    def _awaited(self, seat: Seat) -> list[str]:
        inbound, outbound = seat.mover._inbound, seat.mover._outbound
        peers = list[str]()
        for attempt in inbound._attempts.values():
            state = attempt.state
            if state.reason is None:
                peers += [peer for peer in state.sources if not state.served(peer)]
        for request in outbound._requests.values():
            peers += [name for name, a in request.attempts.items() if not a.state.finished and a.state.reason is None]
        return peers

    def _first(self, seat: Seat, peer: str) -> float:
        """When the oldest of its open transfers began, or it last was stopped: it may have begun to wait then."""
        began = min((o.transfer.started for o in seat.orders if not o.transfer.ended), default=self.network.now)
        return max([began, *(b for _, b in seat.stalls if b <= self.network.now)])

    def _memory(self, seat: Seat) -> None:
        """Outside of the pages that a receive laid open, every byte is what the engine knows it to be."""
        if not seat.dirty:
            return
        seat.dirty = False
        wrong = seat.memory != seat.expected
        if wrong.any():
            pages = set(np.unique(seat.geometry.page_of[wrong]).tolist()) - seat.open_to.keys()
            if pages:
                raise Broken(f"{seat.name}: pages {sorted(pages)} were written and are nobody's to write")

    def _arena(self, seat: Seat) -> None:
        mover = seat.mover
        arena = mover._core.incoming.arena
        if not arena._leased and not mover._inbound._attempts and not mover._inbound.limbo._wards:
            return
        regions = [at for a in mover._inbound._attempts.values() for at in a.state.regions.values()]
        wards = [at for ward in mover._inbound.limbo._wards.values() for at in ward.offsets]
        if len({*regions, *wards}) < len(regions) + len(wards):
            raise Broken(f"{seat.name}: a region is leased twice: {sorted(regions)}, in limbo {sorted(wards)}")
        if set(wards) != arena._quarantined or arena._leased.keys() != {*regions, *wards}:
            known = f"attempts {sorted(regions)}, limbo {sorted(wards)}"
            raise Broken(f"{seat.name}: leased {sorted(arena._leased)}, {sorted(arena._quarantined)} apart; {known}")
        spans = sorted((at, at + size) for at, size in arena._leased.items())
        if any(stop > start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False)):
            raise Broken(f"{seat.name}: regions overlap: {spans}")

    # How a transfer ends.

    def _ended(self, order: Order, result: Result) -> bool:
        """Whether the engine has the pages of an ended transfer back."""
        if not order.closed:
            order.closed = True
            self._result(order, result)
        if order.transfer.held:
            if not result.held:
                raise Broken(f"{order.name} is held, though its result says that it is not")
            return False
        if result.held:
            self.seen[f"{order.verb} held and given back"] += 1
        self._untouched(order)
        if order.verb == "receive" and result.landed:
            self._right(order)
        return True

    def _untouched(self, order: Order) -> None:
        """No operation under way touches pages that are given back, but reads of a source, which must not land."""
        pages = set(order.numbers)
        for posted in self.network.in_flight:
            if order.verb == "receive":
                touched = {page for page, mine in self._target(posted).pages if mine is order}
            elif posted.writes and posted.sender is order.seat.transport:
                seat = order.seat
                here = [at - seat.base for at in posted.ours if 0 <= at - seat.base < len(seat.memory)]
                touched = pages & set(seat.geometry.page_of[here].tolist())
            else:
                touched = set[int]()
            if touched:
                raise Broken(f"{order.name}: pages {sorted(touched)} are given back, and {posted} is under way")
            if order.verb == "send" and not posted.writes and posted.flight.peer == order.seat.name:
                self.seen["pages reused under a read"] += 1

    def _result(self, order: Order, result: Result) -> None:
        self.network.log(lambda: f"{order.name} ended: {result.reason or 'landed'}{', held' if result.held else ''}")
        end = "landed" if result.landed else "held" if result.held else "failed"
        self.seen[f"{order.verb} {end}"] += 1
        if result.reason is not None and not result.reason.strip():
            raise Broken(f"{order.name} failed without a reason")
        if result.landed == (result.cause is not None):
            raise Broken(f"{order.name} ended with reason {result.reason} and cause {result.cause}")
        if self.calm and not result.landed and not self._twice_spoilt(order.request):
            raise Broken(f"{order.name} failed though nothing went wrong: {result.reason}")
        if result.cause is Cause.INTEGRITY and not self._twice_spoilt(order.request):
            raise Broken(f"{order.name} failed for its digests, but nothing was spoilt twice: {result.reason}")
        if order.verb == "receive":
            self._pages(order, result)
            if result.landed:
                self._reached(order, result)

    def _twice_spoilt(self, request: Request) -> bool:
        return any(count > 1 for ((name, _), _), count in self.spoilt.items() if name == request.name)

    def _right(self, order: Order) -> None:
        """The pages hold the source's bytes, and what they held before where nothing was asked for."""
        seat, result = order.seat, order.transfer.result
        assert result is not None
        seat.put_wanted(seat.expected, order)
        mine = seat.geometry.bytes_of(order.numbers)
        wrong = int((seat.memory[mine] != seat.expected[mine]).sum())
        if wrong:
            raise Broken(f"{order.name} landed with {wrong} wrong bytes")
        payloads = order.request.payloads
        if set(result.aux) != set(order.request.asked.aux_from):
            raise Broken(f"{order.name} landed with payloads of {sorted(result.aux)}")
        if any(payload not in payloads[rank] for rank, payload in result.aux.items()):
            raise Broken(f"{order.name} landed with payloads that are not its own: {result.aux}")

    def _pages(self, order: Order, result: Result) -> None:
        """`incomplete` names every page that lacks bytes, and where chunks are unpacked on this side, no other."""
        if result.landed:
            if result.incomplete:
                raise Broken(f"{order.name} landed with incomplete pages {result.incomplete}")
            return
        seat, lacking, whole = order.seat, [set[int]() for _ in order.pages], 0
        for number, chosen, rows in seat.wanted(order):
            part = seat.part(seat.geometry.specs[number].component, order.request.asked.tokens)
            wrong = (seat.memory[rows] != part.of(order.request.truth[number], chosen)).any(axis=(0, 1, 2, 4))
            pages = part.pages[chosen]
            lacking[number] = set(pages[wrong].tolist())
            whole += len(set(pages.tolist())) - len(lacking[number])
        told = [set(pages) for pages in result.incomplete]
        if any(there - here for there, here in zip(lacking, told, strict=True)):
            raise Broken(f"{order.name}: pages {lacking} lack bytes, {told} are called incomplete")
        config = self.scenario.config
        exact = config.route is wire.Route.PACKED and config.verb is Verb.PUSH and not self.scenario.digests
        if exact and told != lacking:
            raise Broken(f"{order.name}: pages {told} are called incomplete, {lacking} lack bytes")
        if whole and any(lacking):
            self.seen["some pages whole, others not"] += 1

    def _reached(self, order: Order, result: Result) -> None:
        asked, seen = order.request.asked, self.seen
        for route in set(result.routes):
            seen[f"{self.scenario.verb.value} {route.value} landed"] += 1
        reached = {
            "gated": asked.steps,
            "aux": asked.aux_from,
            "hybrid": len(order.pages) > 1,
            "resent": result.resent,
            "slow copies": self.scenario.copy_s[1],
            "slow consumer": order.seat.pace_s,
            "after a restart": len(self.seats) > len(self.at),
            "by layers": self.scenario.config.chunk_layers,
        }
        seen.update(f"landed {what}" for what, value in reached.items() if value)

    def refused(self, seat: Seat, request: Request, error: Exception) -> None:
        if self.calm:
            raise Broken(f"{seat.name}: {request.name} was refused though nothing went wrong: {error}")

    def _said(self, sender: str, peer: str, note: bytes) -> None:
        """Nothing is said again and again faster than what is lost is asked for."""
        if note in KEEPALIVES:
            return
        key = (sender, peer, note)
        first, count = self.said.get(key, (self.network.now, 0))
        self.said[key] = first, count + 1
        stopped = sum(b - a for name in (sender, peer) for a, b in self.seats[name].stalls)
        if count > 12 + 10 * stopped + 3 * (self.network.now - first) / self.scenario.config.ping_s:
            raise Broken(f"{sender} -> {peer}: {text_of(note)} said {count + 1} times since {first - 1000:.4f}")

    # Operations under way.

    def posted(self, posted: Posted) -> None:
        """An operation goes where its attempt may put it."""
        target = self.targets[posted] = self._aim(posted)
        self.into.setdefault(target.seat.name, {})[posted] = None
        message = posted.message
        if message is None or not target.seat.alive:
            return
        name = (message.request, message.generation)
        for page, order in target.pages:
            if (order.request.name, order.generation) != name:
                raise Broken(f"{posted}: to page {page}, which is open to {order.name}, {order.generation}")
        if not target.pages and target.owner != (name, (posted.sender.name, message.chunk)):
            raise Broken(f"{posted}: to the region at {target.offset}, which belongs to {target.owner}")

    def _target(self, posted: Posted) -> Target:
        return self.targets[posted]

    def _aim(self, posted: Posted) -> Target:
        """Whose the memory is that an operation will change."""
        seat = self.seats[posted.flight.peer if posted.writes else posted.sender.name]
        if not seat.alive:
            return Target(seat)
        inside = [at - seat.base for at in posted.targets if 0 <= at - seat.base < len(seat.memory)]
        pages = set(seat.geometry.page_of[inside].tolist())
        if not pages:
            offset = posted.targets[0] - seat.mover._core.incoming.memory.address
            return Target(seat, (), offset, self._owner(seat, offset) or self._warded(posted, seat, offset))
        if not pages <= seat.open_to.keys():
            raise Broken(f"{posted}: to pages {sorted(pages - seat.open_to.keys())}, which are open to nobody")
        return Target(seat, tuple((page, seat.open_to[page]) for page in sorted(pages)))

    def _owner(self, seat: Seat, offset: int) -> Owner | None:
        for attempt in seat.mover._inbound._attempts.values():
            for key, at in attempt.state.regions.items():
                if at == offset:
                    return attempt.id, key
        return None

    def _warded(self, posted: Posted, seat: Seat, offset: int) -> Owner | None:
        """A source may use a grant of an attempt that has failed until it hears of that; the region waits for it."""
        message = posted.message
        if message is None:
            return None
        id_ = message.request, message.generation
        ward = seat.mover._inbound.limbo.get((posted.sender.name, *id_))
        return (id_, (posted.sender.name, message.chunk)) if ward and offset in ward.offsets else None

    def _still_its_own(self, posted: Posted) -> None:
        """Where an operation will land still belongs to whom it did when it was posted."""
        target = self.targets[posted]
        seat = target.seat
        if not seat.alive:
            return
        for page, order in target.pages:
            if seat.open_to.get(page) is not order:
                raise Broken(f"{posted}: in flight to page {page}, which is not open to {order.name} any more")
        if target.owner is None or target.pages:
            return
        id_, key = target.owner
        attempt = seat.mover._inbound._attempts.get(id_)
        ward = seat.mover._inbound.limbo.get((key[0], *id_))
        leased = attempt is not None and attempt.state.regions.get(key) == target.offset
        if not leased and (ward is None or target.offset not in ward.offsets):
            raise Broken(f"{posted}: in flight to the region at {target.offset}, which is not leased to it any more")

    def _landing(self, posted: Posted) -> None:
        self._still_its_own(posted)
        if posted.writes and not self.network.is_dead(posted.sender.name) and posted.contents() != posted.before:
            raise Broken(f"{posted}: its memory changed while it was in flight")

    def _gone(self, posted: Posted, spoilt: bool) -> None:
        target = self.targets.pop(posted)
        del self.into[target.seat.name][posted]
        target.seat.dirty = True
        if not spoilt:
            return
        message = posted.message
        if message is not None:
            self.spoilt[(message.request, message.generation), (posted.sender.name, message.chunk)] += 1
            return
        reading = target.seat.mover._reader.flights._posted.get(posted.flight.ticket)
        if reading is not None:
            self.spoilt[reading[0].id, (reading[0].peer, reading[0].chunk)] += 1

    # At the end.

    def left(self) -> list[str]:
        """What movers still remember and should not. Wards of peers that are cut off for ever, or dead without a
        successor, may stay: nothing proves that they write no more."""
        left = [text for seat in self.at.values() if seat.alive for text in self._left_at(seat)]
        return left or [text for seat in self.at.values() if seat.alive for text in self._strangers(seat)]

    def _left_at(self, seat: Seat) -> list[str]:
        mover = seat.mover
        arena, limbo = mover._core.incoming.arena, mover._inbound.limbo
        wards = [key for key in limbo._wards if not self._for_ever(seat, key[0])]
        excused = [w.transfer for key, w in limbo._wards.items() if self._for_ever(seat, key[0])]
        tables = {
            "attempts": mover._inbound._attempts,
            "queue": mover._inbound._credits,
            "limbo": wards,
            "farewells": mover._inbound._farewells,
            "reads": mover._reader.flights,
            "requests": mover._outbound._requests,
            "early": mover._outbound._early,
            "posts": mover._poster._queue,
            "staged": mover._poster._staged,
            "writes": mover._poster.flights,
            "later": mover._core.later,
            "staging": mover._core.outgoing.arena._leased,
            "leased": arena._leased.keys() - arena._quarantined,
            "held": [order for order in seat.orders if order.transfer not in excused],
        }
        return [f"{seat.name} {name}: {len(table)}" for name, table in tables.items() if table]

    def _for_ever(self, seat: Seat, peer: str) -> bool:
        """Whether nothing can be heard of a peer any more, nor that its place was taken."""
        if self.network.is_dead(peer):
            place = self.at[self.seats[peer].place.seat]
            return not place.alive or self.network.unreachable_since(seat.name, place.name) is not None
        return self.network.unreachable_since(seat.name, peer) is not None

    def _strangers(self, seat: Seat) -> list[str]:
        """Ranks of the other engine that live and can be reached are connected."""
        strangers = list[str]()
        for other in self.at.values():
            if other.place.engine != seat.place.engine and other.alive:
                apart = self.network.unreachable_since(seat.name, other.name) is not None
                if not apart and seat.mover._core.peers.get(other.name) is None:
                    strangers.append(f"{seat.name} does not know {other.name}")
        return strangers

    def at_the_end(self) -> None:
        if left := self.left():
            raise Broken(f"left behind when all had ended: {left}")
        for seat in self.at.values():
            if seat.alive:
                limbo = seat.mover._inbound.limbo
                self.seen["left for ever"] += len(limbo)
        self._faults_seen()
        self._told()

    def _faults_seen(self) -> None:
        for fault in self.scenario.faults:
            match fault:
                case Cut(seconds=seconds):
                    self.seen["cut for ever" if seconds is None else "cut and healed"] += 1
                case Crash(back_s=back_s):
                    self.seen["crashed for ever" if back_s is None else "crashed and came back"] += 1
                case _ if fault.seconds > self.scenario.config.silence_s:
                    self.seen["stopped for longer than silence"] += 1
        self.seen.update({f"lost {kind}": count for kind, count in self.network.lost.items()})

    def _told(self) -> None:
        """A push that fails at its destination did not end well at any source that owed it something."""
        lossless = self.profile.ordered and not self.profile.loss
        if self.scenario.faults or not lossless or self.scenario.verb is Verb.PULL:
            return
        for order in self.orders:
            result, rank = order.transfer.result, order.seat.place.rank
            if order.verb == "send" or result is None or result.landed or order.request.received[rank] > 1:
                continue
            asked, fleets = order.request.asked, self.scenario.fleets
            span = range(asked.start, asked.tokens) or range(asked.start, asked.start + 1)
            plans = plans_between(
                self.scenario.components, fleets["p"], fleets["d"], span, self.scenario.config.replicas
            )
            sources = {source for plan in plans if plan for source in plan.sources_of(rank)}
            for other in self.orders:
                told = other.verb == "send" and other.request is order.request and other.transfer.result
                if told and told.landed and other.seat.place.rank in sources:
                    raise Broken(
                        f"{order.name} failed ({result.reason}), but {other.seat.name} was told that it landed"
                    )

