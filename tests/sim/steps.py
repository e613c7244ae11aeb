"""What holds after every step of a mover, whatever happens: its memory, its arena, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from msgspec import structs

from kvmover.transfer.destination.quarantine import ASK_S
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire
from kvmover.transfer.source.source_attempts import SendAttempt
from tests.sim.copies import Touched
from tests.sim.network import text_of
from tests.sim.scenario import OTHER
from tests.sim.scene import Broken, Scene
from tests.sim.seats import Order, Seat

#: A mover acts when it is polled: some heartbeats for what must happen one after the other.
SLACK_S = 0.5


def check_mover(scene: Scene, seat: Seat) -> None:
    """What holds at any time, however late a mover is polled."""
    check_states(seat)
    check_ready(seat)
    check_memory(seat)
    check_arena(seat)
    check_early(scene, seat)
    check_seats(scene, seat)
    check_apart(scene, seat)


def polled(seat: Seat) -> bool:
    """Poll a mover. Returns what it returns. Raises Broken for any exception that is not a check's."""
    try:
        return seat.mover.poll()
    except (Broken, Touched):
        raise
    except Exception as error:
        raise Broken(f"{seat.name}: poll raised {error!r}") from error


def check_states(seat: Seat) -> None:
    """What each state machine promises of its own state; and nothing was raised on the way to it."""
    if seat.mover.meter.counts[Count.FAULTS]:
        raise Broken(f"{seat.name}: an attempt failed by an exception: python -m tests.sim.replay shows it")
    try:
        requests = seat.mover._source._requests.values()
        states = [attempt.state for attempt in seat.mover._destination._attempts]
        states += [attempt.state for request in requests for attempt in request.attempts.values()]
        sound, seat.sound = seat.sound, {id(state): state for state in states}
        for state in states:
            if sound.get(id(state)) is not state:  # a value, and checked before
                state.check()
    except AssertionError as error:
        raise Broken(f"{seat.name}: {error}") from error


def check_ready(seat: Seat) -> None:
    """No chunk is offered, or goes, before its rows were computed and all its pages named."""
    for order in seat.orders:
        request = seat.mover._source._requests.get(order.request.name) if order.verb == "send" else None
        if request is None or request.transfer is not order.transfer:
            continue
        for peer, attempt in request.attempts.items():
            for chunk in attempt.state.ready:
                key = peer, attempt.state.generation, chunk
                if key not in order.seen:
                    order.seen.add(key)
                    _check_chunk(order, attempt, chunk)


def _check_chunk(order: Order, attempt: SendAttempt, chunk: int) -> None:
    lane, tokens = attempt.job.lane, order.request.asked.tokens
    for piece in lane.chunks[chunk].pieces:
        held = lane.src[piece.component]
        pages = piece.units.src // held.spec.page_tokens
        if pages.max() >= order.named[piece.component]:
            raise Broken(
                f"{order.name}: chunk {chunk} goes with {order.named} pages named, and needs page {pages.max()}"
            )
        positions = np.array(list(held.shard.positions or ()))
        last = positions[piece.units.src + piece.units.tokens - 1].max()
        component = held.spec.component
        needed = tokens - 1 if component.states else (last + 1) * component.row_tokens - 1
        layers = piece.leg.layers.stop
        if not any(layers <= step.layers and needed < step.tokens for step in order.computed):
            raise Broken(f"{order.name}: chunk {chunk} goes before it was computed")


def check_memory(seat: Seat) -> None:
    """Outside of the pages that a receive laid open, every byte is what the engine knows it to be."""
    if not seat.dirty:
        return
    seat.dirty = False
    wrong = seat.memory != seat.expected
    if wrong.any():
        pages = set(np.unique(seat.geometry.page_of[wrong]).tolist()) - seat.open_to.keys()
        if pages:
            raise Broken(f"{seat.name}: pages {sorted(pages)} were written and are nobody's to write")


def check_arena(seat: Seat) -> None:
    """Each region is reserved to one chunk, or kept apart for one peer that may still write it; none is forgotten."""
    inbound, arena = seat.mover._destination, seat.mover._core.incoming.arena
    if not arena._reserved and not inbound._attempts and not inbound.quarantine._isolated and not inbound._eager.nbytes:
        return
    regions = [at for attempt in inbound._attempts for at in attempt.state.regions.values()]
    wards = [at for ward in inbound.quarantine._isolated.values() for at in ward.offsets]
    if len({*regions, *wards}) < len(regions) + len(wards):
        raise Broken(f"{seat.name}: a region is reserved twice: {sorted(regions)}, in limbo {sorted(wards)}")
    if set(wards) != arena._quarantined or arena._reserved.keys() != {*regions, *wards}:
        known = f"attempts {sorted(regions)}, limbo {sorted(wards)}"
        raise Broken(f"{seat.name}: reserved {sorted(arena._reserved)}, {sorted(arena._quarantined)} apart; {known}")
    for owner in arena._owned:
        own = [at for at, of in arena._owners.items() if of == owner]
        if len(own) > 1 and 2 * arena.reserved_by(owner) > arena.nbytes:
            raise Broken(f"{seat.name}: {owner} has {arena.reserved_by(owner)} bytes of {arena.nbytes}")
    eager = inbound._eager._regions.keys()
    if not eager <= arena._reserved.keys() or 8 * sum(arena._reserved[at] for at in eager) > arena.nbytes:
        raise Broken(f"{seat.name}: {sorted(eager)} of {arena.nbytes} bytes went out with Wants: {arena._reserved}")
    try:
        arena.check()
    except AssertionError as error:
        raise Broken(f"{seat.name}: {error}") from error


def check_apart(scene: Scene, seat: Seat) -> None:
    """A request fails for what became of a decode engine only when each that has asked for it has failed."""
    if OTHER not in scene.scenario.fleets:
        return
    for request in seat.mover._source._requests.values():
        reason, served = str(request.reason), request.expected.keys() - request.failed.keys()
        if served and any(name in reason for name, other in scene.seats.items() if other.place.engine != "p"):
            raise Broken(f"{seat.name}: {request.transfer.request} fails for {sorted(served)} too: {reason}")


def check_deadline(scene: Scene, order: Order) -> None:
    config, seat, started, now = scene.scenario.config, order.seat, order.transfer.started, scene.network.now
    late = now - started - (order.request.asked.deadline_s or config.deadline_s) - config.drain_s
    if seat.mover._core.copier.busy:  # its own copies end by themselves, however long the queue of them is
        return
    if late > SLACK_S + 5 * seat.pace_s + seat.stopped_within(started, now):
        raise Broken(f"{order.name} is open after its deadline")


def check_silence(scene: Scene, seat: Seat) -> None:
    """Nobody waits for a peer that cannot be reached for longer than it takes to notice."""
    if not scene.scenario.faults or not seat.orders:
        return
    config, network, now = scene.scenario.config, scene.network, scene.network.now
    bound = config.ping_s + config.silence_s + SLACK_S + 5 * seat.pace_s
    for peer, began in _awaited(seat):
        since = network.unreachable_since(seat.name, peer)
        if since is None:
            since = next((a for a, b in scene.seats[peer].stops if a <= now < b), now)
        since = max(since, network.heard_at.get((peer, seat.name), 0.0))
        since = max(since, began, *(until for _, until in seat.stops if until <= now))
        if now - since > bound + seat.stopped_within(since, now):
            raise Broken(f"{seat.name} still waits for {peer}, which is silent since {since - 1000:.4f}")


def check_quarantine(scene: Scene, seat: Seat) -> None:
    """Nothing is kept from a peer that is there to say that it has drained."""
    if not scene.profile.ordered or scene.profile.loss:
        return
    now, held = scene.network.now, seat.mover._destination.quarantine._isolated
    for key in [key for key in scene.idle_since if key[0] == seat.name and key[1] not in held]:
        del scene.idle_since[key]
    for key, ward in held.items():
        peer = scene.seats[key[0]]
        if ward.reads or not _idle(scene, seat, peer, key[1]):
            scene.idle_since.pop((seat.name, key), None)
            continue
        since = scene.idle_since.setdefault((seat.name, key), now)
        if now - since > ASK_S + SLACK_S + 5 * (seat.pace_s + peer.pace_s):
            raise Broken(f"{seat.name}: {key} is kept since {since - 1000:.4f}, and nothing of it is under way")


def check_forgotten(seat: Seat, dead: Seat) -> None:
    """Nothing is kept from a process that is known to be dead, nor is it awaited or dialled."""
    mover = seat.mover
    kept = [
        key for key, ward in mover._destination.quarantine._isolated.items() if key[0] == dead.name and not ward.reads
    ]
    awaited = dead.name in dict(_awaited(seat))
    if kept or awaited or mover._core.peers.get(dead.name) or dead.name in mover._reconnector._lost_peers:
        raise Broken(f"{seat.name}: {dead.name} is dead, as it was told, and not forgotten: {kept}")


def _idle(scene: Scene, seat: Seat, peer: Seat, request: str) -> bool:
    """Whether a peer can be asked, runs, and has nothing in flight to a rank for a request."""
    network, sending = scene.network, peer.mover._source._requests.get(request)
    attempt = sending.attempts.get(seat.name) if sending else None
    known = seat.mover._core.peers.get(peer.name) and peer.mover._core.peers.get(seat.name)
    runs = peer.alive and all(side.stopped_until(network.now) is None for side in (seat, peer))
    free = attempt is None or not attempt.state.in_flight
    return bool(known and runs and free and network.unreachable_since(seat.name, peer.name) is None)


def check_early(scene: Scene, seat: Seat) -> None:
    """Nobody who asks for a request that has ended here is kept waiting for it to begin."""
    for name in seat.mover._source.early._early:
        sent = [o for o in scene.orders if o.seat is seat and o.verb == "send" and o.request.name == name]
        if sent and sent[-1].transfer.ended:
            raise Broken(f"{seat.name}: {name} is waited for, and is over")


def check_seats(scene: Scene, seat: Seat) -> None:
    """No process takes a seat again that a newer one has had, unless that one is dead."""
    peers = seat.mover._core.peers
    sitting = {(engine, rank): name for engine, ranks in peers._ranks.items() for rank, name in ranks.items()}
    if sitting == seat.sitting:
        return
    seat.sitting = sitting
    try:
        peers.check()
    except AssertionError as error:
        raise Broken(f"{seat.name}: {error}") from error
    for place, name in seat.sitting.items():
        generation = scene.seats[name].place.generation
        newest = scene.newest[seat.name, place]
        lives = any(
            each.alive and each.place.seat == place and each.place.generation == newest for each in scene.seats.values()
        )
        if generation < newest and lives:
            raise Broken(f"{seat.name}: {name} sits at {place}, where generation {newest} stands")
        scene.newest[seat.name, place] = generation


def _awaited(seat: Seat) -> Iterator[tuple[str, float]]:
    """Peers that something is awaited from by transfers that have not failed, and since when at the earliest."""
    for attempt in seat.mover._destination._attempts:
        if attempt.state.reason is None:
            began = attempt.transfer.started
            yield from ((peer, began) for peer in attempt.state.sources if not attempt.state.served(peer))
    for request in seat.mover._source._requests.values():
        began = request.transfer.started
        yield from ((n, began) for n, a in request.attempts.items() if not a.state.finished and a.state.reason is None)


def _timeless(message: wire.AnyMessage) -> wire.AnyMessage:
    """Without what is another whenever it is said again."""
    fields = _timed(type(message))
    return structs.replace(message, **fields) if fields else message


@cache
def _timed(kind: type[wire.AnyMessage]) -> dict[str, object]:
    fields = {"lease": wire.WriteLease(), "stamp_us": 0}
    return {name: value for name, value in fields.items() if name in kind.__struct_fields__}


@dataclass(slots=True, eq=False)
class Chatter:
    """Nothing is said again and again faster than what is lost is asked for: (since, last, how often) by note.

    What came in at one time is answered at one time, and counts once.
    """

    scene: Scene
    said: dict[tuple[str, str, bytes], tuple[float, float, int]] = field(
        default_factory=dict["tuple[str, str, bytes]", "tuple[float, float, int]"]
    )

    def check(self, sender: str, peer: str, note: bytes) -> None:
        for message in wire.split(note):
            self._message(sender, peer, message)

    def _message(self, sender: str, peer: str, encoded: bytes) -> None:
        message = wire.decode(encoded)
        if isinstance(message, wire.Ping | wire.Pong):
            return
        self.scene.seen["granted with a Want"] += isinstance(message, wire.Want) and message.grant is not None
        key, now = (sender, peer, wire.encode(_timeless(message))), self.scene.network.now
        first, last, count = self.said.get(key, (now, 0.0, 0))
        count += now > last
        self.said[key] = first, now, count
        # What was said to a stopped process is answered all at once.
        stopped_s = sum(b - a for name in (sender, peer) for a, b in self.scene.seats[name].stops)
        echo = (1 + self.scene.profile.duplicates) ** 2  # of an answer to an answer
        if count > (12 + 10 * stopped_s + 3 * (now - first) / self.scene.scenario.config.ping_s) * echo:
            raise Broken(f"{sender} -> {peer}: {text_of(encoded)} said {count} times since {first - 1000:.4f}")
