"""Writes and reads under way: each goes where its attempt may put it, and that stays its own until it has landed."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.sim.network import Posted
from tests.sim.scene import Broken, Owner, Scene
from tests.sim.seats import Order, Seat


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
class Flights:
    """What is under way. `into` [process]: operations that will change its memory. `revoked`: those that cannot land,
    since the memory was registered anew.
    """

    scene: Scene
    targets: dict[Posted, Target] = field(default_factory=dict[Posted, Target])
    into: dict[str, dict[Posted, None]] = field(default_factory=dict[str, "dict[Posted, None]"])
    revoked: set[Posted] = field(default_factory=set[Posted])

    def posted(self, posted: Posted) -> None:
        target = self.targets[posted] = self._aim(posted)
        self.into.setdefault(target.seat.name, {})[posted] = None
        message = posted.message
        if message is None or not target.seat.alive:
            return
        id_ = message.request, message.generation
        for page, order in target.pages:
            if (order.request.name, order.generation) != id_:
                raise Broken(f"{posted}: to page {page}, which is open to {order.name}, {order.generation}")
        if self.scene.network.is_revoked(posted):
            self._by_old_keys(posted)
            return
        if not target.pages and target.owner != (id_, (posted.sender.name, message.chunk)):
            raise Broken(f"{posted}: to the region at {target.offset}, which belongs to {target.owner}")

    def landing(self, posted: Posted) -> None:
        self.still_its_own(posted)
        dead = self.scene.network.is_dead(posted.sender.name)
        if posted.writes and not dead and posted.contents() != posted.before:
            raise Broken(f"{posted}: its memory changed while it was in flight")

    def ended(self, posted: Posted, spoilt: bool) -> None:
        """It touches memory no longer."""
        target = self.targets.pop(posted)
        self.scene.seen["write refused"] += posted in self.revoked
        self.revoked.discard(posted)
        del self.into[target.seat.name][posted]
        target.seat.dirty = True
        if not spoilt:
            return
        message = posted.message
        if message is not None:
            self.scene.spoilt[(message.request, message.generation), (posted.sender.name, message.chunk)] += 1
            return
        reading = target.seat.mover._reads.flights._posted.get(posted.flight.ticket)
        if reading is not None:
            self.scene.spoilt[reading[0].id, (reading[0].peer, reading[0].chunk)] += 1

    def still_its_own(self, posted: Posted) -> None:
        """Where an operation will land still belongs to whom it did when it was posted."""
        target = self.targets[posted]
        seat = target.seat
        if not seat.alive:
            return
        if self.scene.network.is_revoked(posted):
            self._shut_out(posted)
            return
        for page, order in target.pages:
            if seat.open_to.get(page) is not order:
                raise Broken(f"{posted}: in flight to page {page}, which is not open to {order.name} any more")
        if target.owner is None or target.pages:
            return
        id_, key = target.owner
        attempt = seat.mover._destination._attempts.get(id_)
        ward = seat.mover._destination.quarantine.get((key[0], *id_))
        reserved = attempt is not None and attempt.state.regions.get(key) == target.offset
        if not reserved and (ward is None or target.offset not in ward.offsets):
            raise Broken(f"{posted}: in flight to the region at {target.offset}, which is not reserved to it any more")

    def _by_old_keys(self, posted: Posted) -> None:
        """No chunk is written by keys that are over while its grant is not."""
        target, message = self.targets[posted], posted.message
        attempt = message and target.seat.mover._destination._attempts.get((message.request, message.generation))
        if message and attempt and attempt.state.regions.get((posted.sender.name, message.chunk)) == target.offset:
            raise Broken(f"{posted}: to the region at {target.offset}, which it has, by keys that are over")
        self.revoked.add(posted)

    def _shut_out(self, posted: Posted) -> None:
        """Memory is registered anew under writes of those who are lost, and of nobody else."""
        seat = self.targets[posted].seat
        if posted not in self.revoked and seat.mover._core.peers.get(posted.sender.name) is not None:
            raise Broken(f"{posted}: {seat.name} has shut it out, and is connected to its writer")
        self.revoked.add(posted)

    def untouched(self, order: Order) -> None:
        """Nothing under way touches pages that are given back, but reads from a source, which then must not count."""
        seat = order.seat
        for posted, target in self.targets.items():
            touched = set[int]()
            if order.verb == "receive":
                touched = {page for page, mine in target.pages if mine is order}
            elif posted.writes and posted.sender is seat.transport:
                here = [at - seat.base for at in posted.ours if 0 <= at - seat.base < len(seat.memory)]
                touched = set(order.numbers) & set(seat.geometry.page_of[here].tolist())
            elif not posted.writes and posted.flight.peer == seat.name:
                self.scene.seen["pages reused under a read"] += 1
            if touched:
                raise Broken(f"{order.name}: pages {sorted(touched)} are given back, and {posted} is under way")

    def _aim(self, posted: Posted) -> Target:
        """Whose the memory is that an operation will change."""
        seat = self.scene.seats[posted.flight.peer if posted.writes else posted.sender.name]
        if not seat.alive:
            return Target(seat)
        inside = [at - seat.base for at in posted.targets if 0 <= at - seat.base < len(seat.memory)]
        pages = set(seat.geometry.page_of[inside].tolist())
        if not pages:
            offset = posted.targets[0] - seat.mover._core.incoming.memory.address
            return Target(seat, (), offset, _reserved(seat, offset) or _warded(posted, seat, offset))
        if not pages <= seat.open_to.keys():
            raise Broken(f"{posted}: to pages {sorted(pages - seat.open_to.keys())}, which are open to nobody")
        return Target(seat, tuple((page, seat.open_to[page]) for page in sorted(pages)))


def _reserved(seat: Seat, offset: int) -> Owner | None:
    for attempt in seat.mover._destination._attempts:
        for key, at in attempt.state.regions.items():
            if at == offset:
                return attempt.id, key
    return None


def _warded(posted: Posted, seat: Seat, offset: int) -> Owner | None:
    """A source may use a grant of an attempt that has failed until it hears of that; the region waits for it."""
    message = posted.message
    if message is None:
        return None
    id_ = message.request, message.generation
    ward = seat.mover._destination.quarantine.get((posted.sender.name, *id_))
    return (id_, (posted.sender.name, message.chunk)) if ward and offset in ward.offsets else None
