"""How transfers end: what landed is right, what did not is named, and both sides were told the same."""

from __future__ import annotations

from kvmover.plan.cost import Route
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol.chunks import plans_between, related
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Result, Service
from kvmover.transfer.tombstones import SERVED
from tests.sim.flights import Flights
from tests.sim.scenario import OTHER
from tests.sim.scene import Broken, Scene
from tests.sim.seats import Order


def given_back(scene: Scene, flights: Flights, order: Order, result: Result) -> bool:
    """Whether the engine has the pages of an ended transfer back."""
    if not order.closed:
        order.closed = True
        check_result(scene, order, result)
    if order.transfer.quarantined:
        if not result.quarantined:
            raise Broken(f"{order.name} is quarantined, though its result says that it is not")
        return False
    if result.quarantined:
        scene.seen[f"{order.verb} quarantined and given back"] += 1
    flights.untouched(order)
    if order.verb == "receive" and result.landed:
        check_landed(order, result)
    return True


def check_result(scene: Scene, order: Order, result: Result) -> None:
    """What a mover says of a transfer that has just ended, whose pages may still be quarantined."""
    scene.network.log(
        lambda: f"{order.name} ended: {result.reason or 'landed'}{', quarantined' if result.quarantined else ''}"
    )
    end = "landed" if result.landed else "quarantined" if result.quarantined else "failed"
    scene.seen[f"{order.verb} {end}"] += 1
    if result.reason is not None and not result.reason.strip():
        raise Broken(f"{order.name} failed without a reason")
    if result.landed == (result.cause is not None):
        raise Broken(f"{order.name} ended with reason {result.reason} and cause {result.cause}")
    given = order.verb == "send" and scene.scenario.service is Service.REPEATED and result.cause is Cause.DEADLINE
    if not result.landed and not given and not scene.twice_spoilt(order.request.name):
        if scene.calm and not came_late(scene, order, result):
            raise Broken(f"{order.name} failed though nothing went wrong: {result.reason}")
        # A source that gives up reuses what is being read, so a pull may find the wrong bytes without a wrong bit.
        if result.cause is Cause.INTEGRITY and scene.scenario.config.verb is Verb.PUSH:
            raise Broken(f"{order.name} failed for its digests, but nothing was spoilt twice: {result.reason}")
    if order.verb == "receive":
        _check_pages(scene, order, result)
        if result.landed:
            _note(scene, order, result)
    elif result.landed:
        _check_whole(scene, order)


def came_late(scene: Scene, order: Order, result: Result) -> bool:
    """Of two decode engines one may ask when the other was served, and the request is over: at some rank of the source,
    an engine that had asked all of them before they sent it is served as the other is. A rank that came late ends the
    request of its engine's other ranks too.
    """
    if order.request.asked.other_s is None or result.reason != SERVED:
        return False
    scenario, seat = scene.scenario, order.seat.place
    fleets = scenario.fleets["p"], scenario.fleets[seat.engine]
    between = related(scenario.components, *fleets, scenario.config.replicas)
    sources = set().union(*(between.sources_of(rank) for rank in range(fleets[1].size)))
    waited = (
        other.seat.place.rank
        for other in scene.orders
        if other.verb == "send" and other.request is order.request and seat.engine in other.waited
    )
    return order.verb == "send" or not {*sources, *order.request.asked.aux_from} <= {*waited}


def _check_whole(scene: Scene, order: Order) -> None:
    """A source that served a rank of an engine ends when all its ranks have asked. Of several sources one may have had
    nothing for the rank that landed, and not have heard of it.
    """
    scenario, request = scene.scenario, order.request
    if not scene.calm or request.asked.other_s is None or scenario.fleets["p"].size > 1:
        return
    if request.asked.start == request.asked.tokens:  # nothing was asked for: no rank has to be heard of
        return
    for engine in ("d", OTHER):
        fleets = scenario.fleets["p"], scenario.fleets[engine]
        ranks = related(scenario.components, *fleets, scenario.config.replicas).destinations_of(order.seat.place.rank)
        asked = [o for o in scene.orders if o.request is request and o.seat.place.engine == engine]
        mine = {o.seat.place.rank: o.transfer.result for o in asked if o.seat.place.rank in ranks}
        missing = ranks - mine.keys()
        if missing and any(result is not None and result.landed for result in mine.values()):
            raise Broken(f"{order.name} ended with ranks {sorted(missing)} of {engine} to come")


def check_landed(order: Order, result: Result) -> None:
    """The pages hold the source's bytes, and what they held before where nothing was asked for; so with payloads."""
    seat, asked = order.seat, order.request.asked
    seat.put_wanted(seat.expected, order)
    mine = seat.geometry.bytes_of(order.numbers)
    wrong = int((seat.memory[mine] != seat.expected[mine]).sum())
    if wrong:
        raise Broken(f"{order.name} landed with {wrong} wrong bytes")
    if set(result.aux) != set(asked.aux_from):
        raise Broken(f"{order.name} landed with payloads of {sorted(result.aux)}")
    if any(payload not in order.request.payloads[rank] for rank, payload in result.aux.items()):
        raise Broken(f"{order.name} landed with payloads that are not its own: {result.aux}")


def _check_pages(scene: Scene, order: Order, result: Result) -> None:
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
    config = scene.scenario.config
    exact = config.route is Route.PACKED and config.verb is Verb.PUSH and not scene.scenario.digests
    if exact and told != lacking:
        raise Broken(f"{order.name}: pages {told} are called incomplete, {lacking} lack bytes")
    if whole and any(lacking):
        scene.seen["some pages whole, others not"] += 1


def _note(scene: Scene, order: Order, result: Result) -> None:
    scenario, seen = scene.scenario, scene.seen
    for route in set(result.routes):
        seen[f"{scenario.config.verb.value} {route.value} landed"] += 1
    reached = {
        "gated": order.request.asked.steps,
        "grown": order.request.asked.named,
        "allocated": order.request.asked.allocated,
        "at a second engine": order.seat.place.engine == OTHER,
        "where another failed": any(
            twin.transfer.result is not None and not twin.transfer.result.landed
            for twin in scene.orders
            if twin.request is order.request and twin.seat.place.engine not in ("p", order.seat.place.engine)
        ),
        "aux": order.request.asked.aux_from,
        "hybrid": len(order.pages) > 1,
        "resent": result.resent,
        "slow copies": scenario.copy_s[1],
        "slow consumer": order.seat.pace_s,
        "after a restart": len(scene.seats) > len(scene.at),
        "behind its predecessor's clock": scenario.clocks < 0 and len(scene.seats) > len(scene.at),
        "after a lapse": any(seat.mover.meter.counts[Count.LAPSED_CHUNKS] for seat in scene.seats.values()),
        "by layers": scenario.config.chunk_layers,
        "again of what is given repeatedly": scenario.service is Service.REPEATED
        and order.request.received[order.seat.place.seat] > 1,
    }
    seen.update(f"landed {what}" for what, value in reached.items() if value)


def check_told(scene: Scene) -> None:
    """A push that fails at its destination did not end well at any source that owed it something."""
    scenario, profile = scene.scenario, scene.profile
    if scenario.faults or not profile.ordered or profile.loss or scenario.config.verb is Verb.PULL:
        return
    for order in scene.orders:
        result = order.transfer.result
        if order.verb == "send" or result is None or result.landed:
            continue
        if order.request.received[order.seat.place.seat] > 1 or order.request.asked.other_s is not None:
            continue
        sources = _sources(scene, order)
        for other in scene.orders:
            told = other.verb == "send" and other.request is order.request and other.transfer.result
            if told and told.landed and other.seat.place.rank in sources:
                raise Broken(f"{order.name} failed ({result.reason}), but {other.seat.name} was told that it landed")


def _sources(scene: Scene, order: Order) -> set[int]:
    scenario, asked = scene.scenario, order.request.asked
    span = range(asked.start, asked.tokens) or range(asked.start, asked.start + 1)
    fleets = scenario.fleets["p"], scenario.fleets["d"]
    plans = plans_between(scenario.components, *fleets, span, scenario.config.replicas)
    return {source for plan in plans if plan for source in plan.sources_of(order.seat.place.rank)}
