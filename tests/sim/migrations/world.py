"""A running request moves between two engines over a bad wire, while they die, are cut off, or give up; checked always.

Whole movers on virtual time, as in `tests.sim.world`; here a request writes a row a step, and its bytes are known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import cast

from kvmover.layout import Component, Fleet
from kvmover.migrate import ArrivalPhase, DeparturePhase, MigrationConfig
from kvmover.plan.cost import Costs, Route
from kvmover.transfer.config import Backoff, MoverConfig
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import LoopbackNetwork, Transport
from tests.migrate.migrating import ATTENTION, HYBRID, MOST_TOKENS, Move
from tests.sim.network import SimNetwork, SimTransport
from tests.sim.scenario import DEFAULT, HOSTILE, LOSSY, REORDERED, Profile
from tests.transfer.mover_fleets import Bench, truth_of

#: Between two steps of an engine, each of which polls its mover once.
STEP_S = 0.02
#: When it is known of what was silent that it is dead, at the latest.
TOLD_S = 3.0
#: Everything is settled by then, or never.
HORIZON_S = 120.0
GRIDS = ((1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))

#: No wire loses so much for so long that nobody is heard within `silence_s`.
PROFILES = {profile.name: profile for profile in (DEFAULT, LOSSY, HOSTILE, REORDERED)}


class MigrationBroken(AssertionError):
    """A rule did not hold, with the seed that shows it."""


@dataclass(frozen=True, slots=True)
class MigrationScenario:
    """What a seed is about. `dies`: which engine, when it does, and when that is known. `cut_s`: from when to when the
    two engines cannot reach each other. `gives_up`: which one, and when.
    """

    components: tuple[Component, ...]
    fleets: tuple[Fleet, Fleet]
    config: MoverConfig
    migration: MigrationConfig
    tokens: int
    dies: tuple[str, float, float] | None
    cut_s: tuple[float, float] | None
    gives_up: tuple[str, float] | None

    @classmethod
    def draw(cls, seed: int, profile: Profile) -> MigrationScenario:
        random = Random(f"migration {seed}")
        fleets = tuple(Fleet(*random.choice(GRIDS), page_tokens=random.choice([2, 3, 4, 8])) for _ in range(2))
        config = MoverConfig(
            arena_bytes=256 * random.choice([4, 8, 32]),
            sandbox_bytes=0,
            deadline_s=random.choice([2.0, 12.0]),
            drain_s=0.3,
            ping_s=0.3,
            resend_s=0.2,
            silence_s=1.5 if profile.loss == 0.0 else 4.0,
            lease_s=0.8,
            linger_s=2.2,
            backoff=Backoff(0.1, 0.5, attempts=1000),
            costs=Costs(1.0, 1e3, 1e3, 1e3, 10.0, chunk_bytes=random.choice([128, 256, 1024])),
            route=random.choice([Route.PACKED, Route.PACKED, Route.DIRECT]),
            verb=random.choice(list(Verb)),
        )
        migration = MigrationConfig(random.choice([0, 2, 8]), random.choice([1, 2, 4]), random.choice([2, 3, 6]), 20.0)
        at, told = random.uniform(0, 0.9), random.uniform(0.1, TOLD_S)
        cut = random.uniform(0, 0.8)
        chosen = random.choice(["nothing", "death", "death", "cut", "gives up"])
        return cls(
            random.choice([ATTENTION, HYBRID]),
            (fleets[0], fleets[1]),
            config,
            migration,
            random.randint(1, 24),
            (random.choice("ab"), at, at + told) if chosen == "death" else None,
            (cut, cut + random.uniform(0.2, 6.0)) if chosen == "cut" else None,
            (random.choice("ab"), at) if chosen == "gives up" else None,
        )


class SimBench(Bench):
    """Movers on a simulated wire, and on its clock."""

    def transport(self, name: str) -> Transport:
        return SimTransport(cast(SimNetwork, self.network), name)


class MigrationWorld:
    """One schedule. `run` raises MigrationBroken."""

    def __init__(self, seed: int, profile: str, trace: bool = False) -> None:
        wire = PROFILES[profile]
        self.scenario = scenario = MigrationScenario.draw(seed, wire)
        network = self.network = SimNetwork(seed, replace(wire, corrupt=0.0))
        network.trace = [] if trace else None
        network.log(lambda: f"{scenario}")
        bench = SimBench(scenario.components, scenario.config, network.clock, cast(LoopbackNetwork, network))
        source, target = bench.engine("a", scenario.fleets[0]), bench.engine("b", scenario.fleets[1], "HND")
        tables = source.tables(MOST_TOKENS, 1), target.tables(MOST_TOKENS, 2)
        truth = truth_of(bench.components, MOST_TOKENS)
        self.move = Move(bench, source, target, scenario.tokens, truth, *tables)
        self.move.write()
        target.connect(source)
        self.seen = Counter[str]()
        self.dead: str | None = None
        self.handed = ""

    def run(self) -> None:
        move, network = self.move, self.network
        while not self._greeted():
            self._pass()
            move.turn()
        begun = network.now
        move.begin(self.scenario.migration, network.clock)
        while not all(each.settled for each in (*move.departing, *move.arriving)):
            since = network.now - begun
            if since > HORIZON_S:
                phases = [(each.phase, each.reason) for each in (*move.departing, *move.arriving)]
                raise MigrationBroken(f"not settled after {since:.0f} s: {phases}")
            self._pass()
            self._faults(since)
            self._step()
        self._check_end()

    def _greeted(self) -> bool:
        sides = (self.move.source, self.move.target)
        return all(
            len(mover.ranks(other.name)) == other.fleet.size
            for own, other in (sides, sides[::-1])
            for mover in own.movers
        )

    def _pass(self) -> None:
        """A step's time, with all that the wire does in it."""
        until = self.network.now + STEP_S
        while self.network._agenda and self.network._agenda[0][0] <= until:
            self.network.step()
        self.network.now = until

    def _step(self) -> None:
        phases = [each.phase for each in (*self.move.departing[:1], *self.move.arriving[:1])]
        self.move.step()
        after = [each.phase for each in (*self.move.departing[:1], *self.move.arriving[:1])]
        if phases != after:
            self.network.log(lambda: f"{after}, {self.move.tokens} tokens")

    def _faults(self, since: float) -> None:
        scenario, move = self.scenario, self.move
        engines = {"a": move.source, "b": move.target}
        if scenario.dies is not None:
            engine, at, told = scenario.dies
            if self.dead is None and since >= at:
                self._die(engine)
            if self.dead is not None and since >= told and engines[engine].movers:
                other = engines["b" if engine == "a" else "a"]
                for mover in other.movers:
                    for rank in range(engines[engine].fleet.size):
                        mover.forget(engine, rank)
        if scenario.cut_s is not None:
            inside = scenario.cut_s[0] <= since < scenario.cut_s[1]
            for one in move.source.movers:
                for other in move.target.movers:
                    names = one._transport.name, other._transport.name
                    if inside and frozenset(names) not in self.network.apart:
                        self.network.cut(*names, told=False)
                    elif not inside:
                        self.network.heal(*names)
        if scenario.gives_up is not None and since - STEP_S < scenario.gives_up[1] <= since:
            for departing in move.departing if scenario.gives_up[0] == "a" else ():
                departing.keep("the user left")
            for arriving in move.arriving if scenario.gives_up[0] == "b" else ():
                arriving.decline("no room")

    def _die(self, engine: str) -> None:
        """All of its ranks: an engine with one that is dead computes nothing."""
        move = self.move
        self.dead = engine
        phase = (move.departing if engine == "a" else move.arriving)[0].phase
        self.handed = phase.value
        self.network.log(lambda: f"{engine} dies: {phase.value}")
        dead = move.source if engine == "a" else move.target
        for mover in dead.movers:
            self.network.crash(mover._transport.name, told=False)
            move.bench.movers.remove(mover)
        if engine == "a":
            move.departing = []
        else:
            move.arriving = []

    def _check_end(self) -> None:
        move = self.move
        here = bool(move.arriving) and move.arriving[0].phase is ArrivalPhase.HERE
        back = bool(move.departing) and move.departing[0].phase is DeparturePhase.BACK
        if (
            here == back
            and not (self.dead == "b" and self.handed == "here")
            and not (self.dead == "a" and self.handed == "back")
        ):
            raise MigrationBroken(f"{'both sides have' if here else 'neither side has'} the request, {self.dead} died")
        if here:
            for arriving in move.arriving:
                if arriving.payload != f"{arriving.payload_tokens} tokens".encode():
                    raise MigrationBroken(f"{arriving.payload!r} for {arriving.payload_tokens} tokens")
            landed = move.arriving[0].landed_tokens
            if self.dead is None and landed != move.tokens:
                raise MigrationBroken(f"{landed} tokens landed of {move.tokens}")
            if landed:
                move.assert_target_holds(landed)
        self.seen["here" if here else "back" if back else "with the dead"] += 1
        self.seen[f"{self.dead} died while {self.handed}" if self.dead else "both lived"] += 1


def simulate(seed: int, profile: str, trace: bool = False) -> MigrationWorld:
    """One schedule, run. Raises MigrationBroken with how to see it."""
    world = MigrationWorld(seed, profile, trace)
    try:
        world.run()
    except AssertionError as error:
        log = "\n".join([*(world.network.trace or []), ""])
        how = f"seed {seed}, profile {profile} (replay: python -m tests.sim.migrations.replay {seed} {profile})"
        raise MigrationBroken(f"{log}{error}\n{how}") from error
    return world
