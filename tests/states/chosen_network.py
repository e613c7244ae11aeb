"""A wire on which nothing happens by itself: each note and operation waits until it is chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvmover.transport.loopback import LoopbackTransport, _Flight
from tests.sim.network import Posted, SimNetwork, messages_of

#: Calls that an engine puts off for so long wait for their choice; others happen at once.
BY_CHOICE_S = 100.0

#: A choice: its kind, and the processes, ranks or tickets that it concerns.
Choice = tuple[str | int, ...]
#: (sender, peer) of a channel, or (sender, ticket, peer) of an operation.
Channel = tuple[str, str]
Ticket = tuple[str, int, str]


class ChosenNetwork(SimNetwork):
    """A SimNetwork without chance. `channels`: notes that were said and not heard, in order.

    `flying`: operations that have not landed, `posted_s`: since when. `settling`: operations whose sender has not been
    told of their end. `put_off` [engine, rank]: calls of an engine that wait, in order; `caller`: the rank that now
    calls.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.channels: dict[Channel, deque[bytes]] = {}
        self.flying: dict[Ticket, Posted] = {}
        self.posted_s: dict[Ticket, float] = {}
        self.settling: dict[Ticket, Posted] = {}
        self.put_off: dict[tuple[str, int], deque[Callable[[], None]]] = {}
        self.caller = "", 0
        self._arriving = False

    def at(self, time: float, call: Callable[[], None]) -> None:
        if time >= self.now + BY_CHOICE_S:
            self.put_off.setdefault(self.caller, deque()).append(call)
        elif not self._arriving:  # the end of an operation is told by choice
            call()

    def carry(self, sender: LoopbackTransport, flight: _Flight) -> None:
        posted, ticket = self._taken(sender, flight), (sender.name, flight.ticket, flight.peer)
        if posted is None:
            return
        self.flying[ticket], self.posted_s[ticket] = posted, self.now
        self.log(lambda: f"{posted} posted")
        self.on_post(posted)

    def _say(self, sender: str, peer: str, note: bytes) -> None:
        self.channels.setdefault((sender, peer), deque()).append(note)

    def prompt(self) -> Iterator[Choice]:
        """Returns all that may happen on the wire: a note is heard, an operation lands, and its sender is told."""
        yield from (("hear", *channel) for channel in self.channels)
        yield from (("land", *ticket) for ticket in self.flying)
        yield from (("told", *ticket) for ticket in self.settling)

    def lose(self, channel: Channel) -> None:
        """Let the next note of a channel be heard by nobody."""
        note = self.take(channel, 0)
        kinds = ", ".join(type(message).__name__ for message in messages_of(note))
        self.log(lambda: f"{channel[0]} -> {channel[1]} LOST {kinds}")

    def repeat(self, channel: Channel) -> None:
        """Let the next note of a channel come again, after all others."""
        notes = self.channels[channel]
        notes.append(notes[0])

    def take(self, channel: Channel, number: int) -> bytes:
        """Remove a note from its channel."""
        notes = self.channels[channel]
        note = notes[number]
        del notes[number]
        if not notes:
            del self.channels[channel]
        return note

    def deliver(self, channel: Channel, number: int) -> None:
        """Let a process hear one of the notes under way to it."""
        note = self.take(channel, number)
        self._hear(*channel, note)

    def land(self, ticket: Ticket) -> None:
        """Let an operation touch its target, or come to nothing if its peer is gone."""
        posted = self.flying.pop(ticket)
        if not self.is_dead(ticket[0]):
            self.settling[ticket] = posted
        self._arriving = True
        try:
            self._arrive(posted, 0.0, True, False)
        finally:
            self._arriving = False

    def tell_end(self, ticket: Ticket) -> None:
        """Tell the sender of an operation that it has ended."""
        self._complete(self.settling.pop(ticket))

    def crash(self, name: str, told: bool) -> None:
        super().crash(name, told)
        for channel in [channel for channel in self.channels if name in channel]:
            del self.channels[channel]
        for ticket in [ticket for ticket in self.settling if ticket[0] == name]:
            del self.settling[ticket]
