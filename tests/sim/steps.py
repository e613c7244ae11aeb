"""What holds after every step of a mover, whatever happens: its memory, its arena, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvmover.transfer.protocol import wire
from kvmover.transfer.source.attempts import SendAttempt
from tests.sim.network import text_of
from tests.sim.scene import Broken, Scene
from tests.sim.seats import Order, Seat

#: A mover acts when it is polled: some heartbeats for what must happen one after the other.
SLACK_S = 0.5

#: Notes that say the same however often they are said.
KEEPALIVES = {wire.encode(wire.Ping()), wire.encode(wire.Pong())}


def check_states(seat: Seat) -> None:
    """What each state machine promises of its own state."""
    try:
        for attempt in seat.mover._destination._attempts.values():
            attempt.state.check()
        for request in seat.mover._source._requests.values():
            for attempt in request.attempts.values():
                attempt.state.check()
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
        needed = tokens - 1 if held.spec.component.states else last
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
    """Each region is leased to one chunk, or kept apart for one peer that may still write it; none is forgotten."""
    inbound, arena = seat.mover._destination, seat.mover._core.incoming.arena
    if not arena._leased and not inbound._attempts and not inbound.quarantine._held:
        return
    regions = [at for attempt in inbound._attempts.values() for at in attempt.state.regions.values()]
    wards = [at for ward in inbound.quarantine._held.values() for at in ward.offsets]
    if len({*regions, *wards}) < len(regions) + len(wards):
        raise Broken(f"{seat.name}: a region is leased twice: {sorted(regions)}, in limbo {sorted(wards)}")
    if set(wards) != arena._quarantined or arena._leased.keys() != {*regions, *wards}:
        known = f"attempts {sorted(regions)}, limbo {sorted(wards)}"
        raise Broken(f"{seat.name}: leased {sorted(arena._leased)}, {sorted(arena._quarantined)} apart; {known}")
    spans = sorted((at, at + size) for at, size in arena._leased.items())
    if any(stop > start for (_, stop), (start, _) in pairwise(spans)):
        raise Broken(f"{seat.name}: regions overlap: {spans}")


def check_deadline(scene: Scene, order: Order) -> None:
    config, seat, started, now = scene.scenario.config, order.seat, order.transfer.started, scene.network.now
    late = now - started - config.deadline_s - config.drain_s
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
    for peer in _awaited(seat):
        since = network.unreachable_since(seat.name, peer)
        if since is None:
            since = next((a for a, b in scene.seats[peer].stops if a <= now < b), now)
        since = max(since, network.heard_at.get((peer, seat.name), 0.0))
        if now - since > bound + seat.stopped_within(since, now) and now - _waiting_since(seat, now) > bound:
            raise Broken(f"{seat.name} still waits for {peer}, which is silent since {since - 1000:.4f}")


def check_early(scene: Scene, seat: Seat) -> None:
    """Nobody who asks for a request that has ended here is kept waiting for it to begin."""
    for name in seat.mover._source._early._early:
        sent = [o for o in scene.orders if o.seat is seat and o.verb == "send" and o.request.name == name]
        if sent and sent[-1].transfer.ended:
            raise Broken(f"{seat.name}: {name} is waited for, and is over")


def _awaited(seat: Seat) -> Iterator[str]:
    """Peers that something is awaited from by transfers that have not failed."""
    for attempt in seat.mover._destination._attempts.values():
        if attempt.state.reason is None:
            yield from (peer for peer in attempt.state.sources if not attempt.state.served(peer))
    for request in seat.mover._source._requests.values():
        yield from (n for n, a in request.attempts.items() if not a.state.finished and a.state.reason is None)


def _waiting_since(seat: Seat, now: float) -> float:
    """When its oldest open transfer began, or it was polled again: it cannot have begun to wait before."""
    began = min((order.transfer.started for order in seat.orders if not order.transfer.ended), default=now)
    return max([began, *(until for _, until in seat.stops if until <= now)])


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
        if note in KEEPALIVES:
            return
        key, now = (sender, peer, note), self.scene.network.now
        first, last, count = self.said.get(key, (now, 0.0, 0))
        count += now > last
        self.said[key] = first, now, count
        # What was said to a stopped process is answered all at once.
        stopped_s = sum(b - a for name in (sender, peer) for a, b in self.scene.seats[name].stops)
        echo = (1 + self.scene.profile.duplicates) ** 2  # of an answer to an answer
        if count > (12 + 10 * stopped_s + 3 * (now - first) / self.scene.scenario.config.ping_s) * echo:
            raise Broken(f"{sender} -> {peer}: {text_of(note)} said {count} times since {first - 1000:.4f}")
