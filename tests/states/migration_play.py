"""A migration as a play: a running request moves between two engines of one rank, and each next event is chosen."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from msgspec import structs

from kvmover.layout import Component, Fleet, Pool
from kvmover.migrate import ArrivalPhase, ArrivingRank, DepartingRank, DeparturePhase, MigrationConfig
from kvmover.plan.cost import Route
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Place
from kvmover.transport import Transport
from tests.migrate.migrating import Move
from tests.sim.network import SimTransport, messages_of
from tests.sim.scene import Broken
from tests.states.chosen_network import Choice, ChosenNetwork, Ticket
from tests.states.picture import Painter, contents_of, places_of
from tests.states.play import due_times, has_more, in_one_order
from tests.states.stages import CONFIG
from tests.transfer.mover_fleets import Bench, truth_of

#: Tokens that the request has at first, and that it computes while it moves, beside those that the last round awaits.
TOKENS, COMPUTED = 2, 2
#: The longest step of the request, in seconds: half of the patience of the round that awaits its token.
STEP_S = CONFIG.deadline_s / 2
MIGRATION = MigrationConfig(tail_tokens=1, ahead_tokens=1, most_rounds=3, patience_s=8.0)
MODEL = (Component("mla", 1, 1, 1, 16, "uint8"),)
RANK = Fleet(1, 1, 1, page_tokens=2)


class ChosenBench(Bench):
    """Movers on a wire of choices, and on its clock."""

    def transport(self, name: str) -> Transport:
        return SimTransport(cast(ChosenNetwork, self.network), name)

    def mover(
        self, place: Place, pools: Sequence[Pool], config: MoverConfig | None = None, model: str = "toy"
    ) -> Mover:
        """A mover whose generations are not taken from the time of day."""
        made = Bench.mover(self, structs.replace(place, generation=1), pools, config, model)
        made._destination.generation = 1_000_000
        return made


@dataclass(slots=True, eq=False)
class MigrationPlay:
    """One migration of `route`. `faults`: how many of each kind may come; `left`: tokens that may still be computed.

    `stopping_s`: since when the last round awaits a token.
    """

    faults: tuple[tuple[str, int], ...] = ()
    route: Route = Route.PACKED
    network: ChosenNetwork = field(default_factory=ChosenNetwork)
    move: Move = field(init=False)
    woken: dict[str, None] = field(default_factory=dict[str, None])
    spent: Counter[str] = field(default_factory=Counter[str])
    left: int = COMPUTED
    stopping_s: float = math.inf

    def __post_init__(self) -> None:
        network = self.network
        network.wake = lambda name: self.woken.update({name: None})
        config = replace(CONFIG, route=self.route, arena_bytes=1024)
        bench = ChosenBench(MODEL, config, network.clock, network)
        source, target = bench.engine("a", RANK, pages=8), bench.engine("b", RANK, "HND", pages=8)
        most = 8
        tables = source.tables(most, 1), target.tables(most, 2)
        self.move = move = Move(bench, source, target, TOKENS, truth_of(MODEL, most), *tables)
        for mover in bench.movers:
            for staging in (mover._core.outgoing, mover._core.incoming):
                staging.tensor.zero_()
        move.write()
        target.connect(source)
        self.woken = dict.fromkeys(self.names)
        while self.woken or network.channels:
            for name in list(self.woken):
                self._poll(name)
            for channel in list(network.channels):
                self._hear(*channel)
        move.begin(MIGRATION, network.clock)
        self.woken = dict.fromkeys(self.names)

    @property
    def names(self) -> list[str]:
        """The processes, by name: the source's, then the target's."""
        return [mover._transport.name for mover in self.move.bench.movers]

    @property
    def departing(self) -> DepartingRank:
        return self.move.departing[0]

    @property
    def arriving(self) -> ArrivingRank:
        return self.move.arriving[0]

    def choices(self) -> list[Choice]:
        """Returns all that may happen next. No time passes while a note, an operation or a token is due."""
        network = self.network
        prompt: list[Choice] = [*(("poll", name) for name in self.woken), *network.prompt()]
        found = [*prompt, *self._faults(prompt)]
        if self._awaits_token or (self.left and self.departing.may_write):
            found.append(("compute",))
        latest_s = self.stopping_s + STEP_S if self._awaits_token else sys.float_info.max
        if not prompt and self._due_s() <= latest_s:
            found.append(("wait",))
        return found

    @property
    def _awaits_token(self) -> bool:
        return self.departing.phase is DeparturePhase.STOPPING

    def _faults(self, prompt: list[Choice]) -> Iterator[Choice]:
        may = {kind for kind, most in self.faults if self.spent[kind] < most}
        for kind, *rest in prompt:
            if kind == "hear":
                yield from ((fault, *rest) for fault in ("lose", "repeat") if fault in may)
        if "abort" in may:
            yield from (("abort", side) for side, machine in self._sides() if not machine.settled)

    def _sides(self) -> list[tuple[str, DepartingRank | ArrivingRank]]:
        return [("a", self.departing), ("b", self.arriving)] if self.move.departing else []

    def _due_s(self) -> float:
        """When a mover or a side of the migration has something to do next."""
        times = list[float]()
        for mover in self.move.bench.movers:
            times += due_times(mover)
        for _, machine in self._sides():
            if not machine.settled:
                times += [at for at in _times(machine) if at > self.network.now]
        return min(times, default=math.inf)

    def act(self, choice: Choice) -> None:
        """Let a choice happen. Raises Broken when a property does not hold after it."""
        kind, *rest = choice
        if kind in ("lose", "repeat", "abort"):
            self.spent[str(kind)] += 1
        getattr(self, f"_{kind}")(*rest)
        for mover in self.move.bench.movers:
            in_one_order(mover._core.timers)
        self.stopping_s = min(self.stopping_s, self.network.now) if self._awaits_token else math.inf
        if self.is_over:
            self._check_end()

    def _poll(self, name: str) -> None:
        self.woken.pop(name, None)
        number = self.names.index(name)
        mover = self.move.bench.movers[number]
        busy = self._holds(mover.poll)
        if self.move.departing:
            self._holds(self.departing.poll if number == 0 else self._poll_arriving)
            self._holds(self.move.check)
            mover.poll()
        if busy and has_more(mover):
            self.woken[name] = None

    def _poll_arriving(self) -> None:
        arriving = self.arriving
        arriving.poll()
        if arriving.pages_for:
            arriving.allocated(arriving.pages_for, self.move.part(self.move.target, 0, arriving.pages_for))

    @staticmethod
    def _holds(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AssertionError as error:
            raise Broken(f"{call.__qualname__}: {error}") from error

    def _hear(self, sender: str, peer: str) -> None:
        self.network.deliver((sender, peer), 0)
        if peer in self.woken:
            self._poll(peer)

    def _lose(self, sender: str, peer: str) -> None:
        self.network.lose((sender, peer))

    def _repeat(self, sender: str, peer: str) -> None:
        self.network.repeat((sender, peer))
        self._hear(sender, peer)

    def _land(self, *ticket: *Ticket) -> None:
        self.network.land(ticket)

    def _told(self, *ticket: *Ticket) -> None:
        self.network.tell_end(ticket)
        if ticket[0] in self.woken:
            self._poll(ticket[0])

    def _compute(self) -> None:
        """Let the request compute a token at the source."""
        self.left = max(0, self.left - 1)
        self.move.tokens += 1
        self.move.write()
        self.network.log(lambda: f"{self.names[0]}: computes token {self.move.tokens}")
        self.departing.wrote(self.move.now(0))
        self.woken[self.names[0]] = None

    def _abort(self, side: str) -> None:
        name = self.names["ab".index(side)]
        self.network.log(lambda: f"{name}: gives the migration up")
        if side == "a":
            self.departing.keep("the user left")
        else:
            self.arriving.decline("no room")
        self.woken[name] = None

    def _wait(self) -> None:
        self.network.now = max(self.network.now, self._due_s())
        self.network.log(lambda: "time passes")
        self.woken.update(dict.fromkeys(self.names))

    @property
    def is_over(self) -> bool:
        """Whether both sides are settled, and nothing is under way."""
        network = self.network
        if self.woken or network.channels or network.in_flight or network.settling or not self.move.departing:
            return False
        return self.departing.settled and self.arriving.settled

    def _check_end(self) -> None:
        """One side has the request, and all of its rows."""
        here, back = self.arriving.phase is ArrivalPhase.HERE, self.departing.phase is DeparturePhase.BACK
        if here == back:
            raise Broken(f"{'both sides have' if here else 'neither side has'} the request")
        if back and not set(self.spent) & {"abort"}:
            raise Broken(f"the request came back after {sorted(self.spent)}: {self.departing.reason}")
        if here:
            if self.arriving.landed_tokens != self.move.tokens:
                raise Broken(f"{self.arriving.landed_tokens} tokens landed of {self.move.tokens}")
            self._holds(lambda: self.move.assert_target_holds(self.move.tokens))

    def picture(self) -> str:
        """Returns the picture of both movers, both sides of the migration, and the wire."""
        network = self.network
        painter = Painter(network.now, places_of(self.move.bench.movers))
        for pair in sorted(network.channels):
            painter.paint((pair, [messages_of(note) for note in network.channels[pair]]))
        painter.paint(
            (sorted(network.flying), sorted(network.settling), sorted(self.woken), sorted(self.spent.items()))
        )
        painter.paint((self.left, self.stopping_s, self.move.tokens, [machine for _, machine in self._sides()]))
        for mover in self.move.bench.movers:
            painter.paint((mover, contents_of(mover)))
        return painter.text()


def _times(machine: DepartingRank | ArrivingRank) -> Iterator[float]:
    """The times that a side of a migration keeps, and when its patience with each is over."""
    for value in vars(machine).values():
        if isinstance(value, float):
            yield from (value, value + MIGRATION.patience_s)
