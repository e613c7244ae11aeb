"""What a seed is about, drawn as plain values: a model, two fleets, how they move, requests, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from kvmover.layout import Component, Fleet
from kvmover.layout.fleet import CpOrder
from kvmover.plan.cost import Costs, Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.config import Backoff, Integrity, MoverConfig
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import ALL, Service
from kvmover.transport import Revocation

MODELS = (
    (Component("attention", 2, 2, 2, 16, "uint8"),),
    (Component("mla", 2, 1, 1, 32, "uint8"),),
    (
        Component("attention", 2, 2, 2, 8, "uint8"),
        Component("sliding", 2, 2, 2, 8, "uint8", window=3),
        Component("state", 2, 1, 2, 16, "uint8", states=2),
    ),
)
#: Rows of several tokens beside a window, both in pages of their own: of one schedule in eight.
COMPRESSED = (
    Component("attention", 2, 2, 2, 8, "uint8"),
    Component("compressed", 2, 1, 1, 16, "uint8", row_tokens=3),
    Component("sliding", 2, 2, 2, 8, "uint8", window=3),
)
#: The deadline where nothing goes wrong: slow copies and lost notes may take their time.
CALM_S = 12.0
#: How long processes of one host may be cut off: longer than a lease and what lingers of it, and until they meet again.
NEAR_CUT_S = 3.5
#: Grids of (tp, pp, cp).
GRIDS = ((1, 1, 1), (1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 3))
ENGINES = ("p", "d")
#: A second decode engine, and how many of the requests it asks for where it is.
OTHER = "e"
OTHER_ASKS = 0.7


def linked(one: str, other: str) -> bool:
    """Whether ranks of two engines know each other: the prefill and any decode do, two decodes do not."""
    return (one == "p") != (other == "p")


@dataclass(frozen=True, slots=True)
class Profile:
    """What the wire does to what it carries, and how much else goes wrong. Probabilities are for each note, each write
    and read, and `calm` for a whole schedule in which nothing does, `others` for one with a second decode engine.
    `grids` of the prefill; `tokens` of a request, at least and at most; how much decodes ask `ahead_s` of its prefill;
    how often their pages are `allocated` part by part; `mixed`: how often its processes are of two releases, and
    `repeated`: how often a prefill gives to all who ask, as often as they do.
    """

    name: str
    ordered: bool = True
    loss: float = 0.0
    duplicates: float = 0.0
    late: float = 0.08
    late_reads: float = 0.2
    late_notes: float = 0.03
    corrupt: float = 0.12
    delay_s: tuple[float, float] = (0.001, 0.02)
    late_s: tuple[float, float] = (0.2, 2.0)
    wants_first: bool = False
    calm: float = 0.15
    deadlines_s: tuple[float, ...] = (1.0, 1.0, 2.0)
    silence_s: float = 0.75
    verbs: tuple[Verb, ...] = tuple(Verb)
    integrity: tuple[Integrity, ...] = (Integrity.NONE, Integrity.NONE, Integrity.DIGEST)
    ambushes: float = 0.3
    crashes: float = 0.12
    stops: float = 0.2
    long_stop_s: tuple[float, float] = (1.0, 2.2)
    copies_s: tuple[tuple[float, float], ...] = ((0.0, 0.0), (0.0, 0.0), (0.001, 0.03), (0.05, 0.3))
    replaced: float = 0.0
    routes: tuple[Route | None, ...] = (*Route, None)
    sharing: float = 0.2
    revocations: tuple[Revocation | None, ...] = (None, None, Revocation.UNPROVEN)
    others: float = 0.25
    grids: tuple[tuple[int, int, int], ...] = GRIDS
    tokens: tuple[int, int] = (1, 12)
    ahead_s: float = 0.0
    allocated: float = 0.3
    mixed: float = 0.0
    repeated: float = 0.0


#: What NIXL does: notes of one peer stay in order and none is lost while the peer lives; a write may take for ever.
DEFAULT = Profile("default")
#: Nothing goes wrong but that notes are lost, so every request must land: what is lost is asked for again.
LOSSY = Profile("lossy", loss=0.1, late=0.0, late_reads=0.0, calm=1.0, silence_s=4.0)
#: Reads from sources that name their pages part by part, of which many parts are lost.
PULLED = replace(LOSSY, name="pulled", loss=0.3, verbs=(Verb.PULL,))
#: What nobody promises, and nothing may be corrupted by.
REORDERED = Profile(
    "reordered", ordered=False, loss=0.03, duplicates=0.25, late=0.1, corrupt=0.25, delay_s=(0.001, 0.15)
)
#: As before, but that no message overtakes the Want that it follows, and no Want comes twice.
HOSTILE = replace(REORDERED, name="hostile", wants_first=True)
#: Writes, of which most are told of twice and many come to harm: stale news of every kind.
ECHOES = replace(HOSTILE, name="echoes", duplicates=0.6, corrupt=0.4, calm=0.0, verbs=(Verb.PUSH,))
#: Reads from sources that give up under them, and whose notes are held up.
AMBUSHED = replace(HOSTILE, name="ambushed", late_notes=0.3, calm=0.0, verbs=(Verb.PULL,), ambushes=0.8)
#: Ranks that die with writes under way.
FRAIL = replace(DEFAULT, name="frail", late=0.3, calm=0.0, crashes=0.5)
#: Ranks that are stopped in mid-copy, or whose copies take so long, that their leases are over before they write, or
#: while they copy into a mapped pool.
DROWSY = replace(
    DEFAULT,
    name="drowsy",
    calm=0.0,
    verbs=(Verb.PUSH,),
    stops=0.6,
    long_stop_s=(3.3, 6.0),
    copies_s=((0.05, 0.3), (1.0, 4.0), (2.0, 5.0)),
)
#: Ranks that die or are cut off with writes under way, into arenas of slabs that are registered anew.
REVOKED = replace(
    FRAIL,
    name="revoked",
    late=0.5,
    verbs=(Verb.PUSH,),
    routes=(Route.PACKED,),
    sharing=0.0,
    revocations=(Revocation.PROVEN,),
)
#: Ranks that are cut off, replaced, and heard of again: nobody takes the old process for the new one.
REPLACED = replace(DEFAULT, name="replaced", calm=0.0, crashes=0.0, replaced=1.0)
#: Two decode engines of several ranks that ask for the same requests.
SEVERAL = replace(DEFAULT, name="several", calm=0.4, crashes=0.3, others=1.0)
#: Processes of two releases, of which every second one to be born lacks the newest message and the newest field.
MIXED = replace(
    DEFAULT, name="mixed", loss=0.05, calm=0.5, silence_s=4.0, others=0.5, ahead_s=0.3, verbs=tuple(Verb), mixed=1.0
)
#: Two decode engines that ask before the ranks of a prefill send, each in its own time, of which some have no chunk.
STAGGERED = replace(
    DEFAULT,
    name="staggered",
    calm=1.0,
    others=1.0,
    grids=((1, 1, 2), (1, 1, 3), (2, 1, 2)),
    tokens=(1, 3),
    ahead_s=0.3,
    allocated=0.9,
)
#: Decode engines that ask again and again, of a prefill that gives until its deadline, long after all is copied.
REPEATED = replace(LOSSY, name="repeated", loss=0.05, others=0.6, copies_s=((0.0, 0.0), (0.001, 0.03)), repeated=1.0)
PROFILES = {
    profile.name: profile
    for profile in (
        DEFAULT,
        LOSSY,
        HOSTILE,
        REORDERED,
        ECHOES,
        AMBUSHED,
        FRAIL,
        REVOKED,
        DROWSY,
        REPLACED,
        PULLED,
        SEVERAL,
        STAGGERED,
        MIXED,
        REPEATED,
    )
}


#: How much of each fault a swarm may have.
_SWARM = {
    "loss": 0.15,
    "duplicates": 0.6,
    "late": 0.3,
    "late_reads": 0.4,
    "late_notes": 0.3,
    "corrupt": 0.4,
    "ambushes": 0.8,
    "crashes": 0.5,
    "stops": 0.6,
    "replaced": 0.5,
}


def profile_of(name: str, seed: int) -> Profile:
    """The profile of that name. Every seed of `swarm` has its own: half of the faults never happen, the others as often
    as chance says, so that a fault that hides another one is often away.
    """
    if name != "swarm":
        return PROFILES[name]
    random = Random(f"swarm {seed}")
    faults = {fault: random.choice([0.0, random.uniform(0, most)]) for fault, most in _SWARM.items()}
    ordered, wants_first = random.random() < 0.7, random.random() < 0.5
    return replace(DEFAULT, name=name, calm=0.0, ordered=ordered, wants_first=wants_first, **faults)


@dataclass(frozen=True, slots=True)
class Step:
    """So long after a rank offered a request, layers below `layers` of positions below `tokens` are computed."""

    seconds: float
    layers: int = ALL
    tokens: int = ALL


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of `tokens` tokens, of which those from `start` on are wanted.

    `begin_s` [engine]: when its ranks are called, and `other_s` those of the second decode engine (None: never).
    `steps`: how it is computed (none: all of it is there). `named`: which share of each page table a source names with
    the request, and then with each step (none: all of it with the request). `allocated`: (seconds, share) of each table
    that a destination has named so long after it asked (none: all of it with the request). `aux_from`: source ranks
    with a payload, handed over `aux_s` later (0: with the request). `abort`: which engine gives it up, and when.
    `ambush`: the source gives it up while so many-th of its chunks is under way. `refused`: the source says that it
    will not send it. `retries`: how often it is asked for again when it failed, and `again` also when it landed, under
    the same name. `deadline_s`: its own (None: the movers').
    """

    name: str
    tokens: int
    start: int
    begin_s: tuple[float, float]
    steps: tuple[Step, ...] = ()
    named: tuple[float, ...] = ()
    aux_from: tuple[int, ...] = ()
    aux_s: float = 0.0
    abort: tuple[str, float] | None = None
    ambush: int | None = None
    refused: bool = False
    retries: int = 0
    again: bool = False
    deadline_s: float | None = None
    allocated: tuple[tuple[float, float], ...] = ()
    other_s: float | None = None

    @property
    def begins(self) -> dict[str, float]:
        """By engine, when its ranks are called."""
        other = {} if self.other_s is None else {OTHER: self.other_s}
        return {**dict(zip(ENGINES, self.begin_s, strict=True)), **other}


@dataclass(frozen=True, slots=True)
class Crash:
    """A rank dies, and another process takes its place `back_s` later (None: never). `told`: its peers hear of it from
    the transport; else their notes to it vanish. `forgotten`: an orchestrator tells them that it is dead, when all that
    it had under way has landed or never will."""

    rank: tuple[str, int]
    at_s: float
    back_s: float | None
    told: bool
    forgotten: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """A rank is not polled for a while, as if stopped."""

    rank: tuple[str, int]
    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A source and a destination rank cannot reach each other for `seconds` (None: for ever). `told` as in Crash."""

    ranks: tuple[int, int]
    at_s: float
    seconds: float | None
    told: bool


@dataclass(frozen=True, slots=True)
class Replace:
    """Nobody reaches a live rank any more, for `seconds`; `after_s` later another process takes its place. `told` as in
    Crash. It is not stopped, and it is back when everybody has given it up and before it has given up everybody."""

    rank: tuple[str, int]
    at_s: float
    after_s: float
    seconds: float
    told: bool


Fault = Crash | Stop | Cut | Replace


@dataclass(frozen=True, slots=True)
class Scenario:
    """`copy_s`: how long gathers and scatters take, (0, 0) for at once. `pace_s` [engine]: how late a rank is polled.
    `separate`: pool axes with an allocation an index, at the source. `clocks`: 1, or -1 where the clock of each process
    that takes the place of another is behind that one's. `mixed`: its processes are of two releases."""

    components: tuple[Component, ...]
    fleets: dict[str, Fleet]
    config: MoverConfig
    calm: bool
    copy_s: tuple[float, float]
    pace_s: tuple[float, float]
    separate: tuple[str, ...]
    shared: bool
    requests: tuple[Asked, ...]
    faults: tuple[Fault, ...] = field(default=())
    clocks: Literal[1, -1] = 1
    mixed: bool = False
    service: Service = Service.ONCE

    @classmethod
    def draw(cls, seed: int, profile: Profile) -> Scenario:
        random = Random(f"scenario {seed}")
        calm = random.random() < profile.calm
        components = random.choice(MODELS)
        fleets = {engine: _fleet(random, profile.grids if engine == "p" else GRIDS) for engine in ENGINES}
        own = Random(f"compressed {seed}")
        if own.random() < 0.125:
            components, fleets = COMPRESSED, {engine: _own_pages(own, fleet) for engine, fleet in fleets.items()}
        revocation = Random(f"revocation {seed}").choice(profile.revocations)
        config = replace(_config(random, profile, calm), revocation=revocation)
        scenario = cls(
            components,
            fleets,
            config,
            calm,
            random.choice(profile.copies_s),
            (0.0 if random.random() < 0.9 else 0.1, random.choice([0.0, 0.0, 0.0, 0.15])),
            random.choice([(), ("layer",), ("layer", "kv")]),
            config.route is Route.MAPPED or random.random() < profile.sharing,
            tuple(
                _request(random, profile, f"r{i}", fleets["p"].size, calm) for i in range(random.choice([1, 2, 2, 3]))
            ),
            () if calm else tuple(_faults(random, profile, fleets)),
        )
        drawn = scenario._allocating(Random(f"allocated {seed}"), profile.allocated)._asked_twice(
            Random(f"other {seed}"), profile
        )
        drawn = drawn._on_one_host() if drawn.shared else drawn
        behind = any(isinstance(each, Crash) for each in drawn.faults) and Random(f"clocks {seed}").random() < 0.25
        mixed = Random(f"mixed {seed}").random() < profile.mixed
        if Random(f"repeated {seed}").random() < profile.repeated:
            drawn = drawn._repeated()
        return replace(drawn, clocks=-1 if behind else 1, mixed=mixed)

    def _repeated(self) -> Scenario:
        """The same scenario, whose decodes ask for each request three times, of a prefill that gives repeatedly. No
        engine asks for nothing: that would end the request.
        """
        requests = tuple(
            replace(asked, start=min(asked.start, asked.tokens - 1), retries=2, again=True, deadline_s=2 * CALM_S)
            for asked in self.requests
        )
        return replace(self, requests=requests, service=Service.REPEATED)

    def generation(self, births: int) -> int:
        """Of the process that is so manieth at its place."""
        return births if self.clocks == 1 else 1000 - births

    def _on_one_host(self) -> Scenario:
        """Processes that map each other's memory are not cut off for ever, but for longer than a clock would wait."""
        return replace(
            self,
            faults=tuple(
                replace(fault, seconds=NEAR_CUT_S) if isinstance(fault, Cut) and fault.seconds is None else fault
                for fault in self.faults
            ),
        )

    def _allocating(self, random: Random, often: float) -> Scenario:
        """Some requests get their pages at the destination part by part."""
        shared = (_parts(random) if random.random() < often else () for _ in self.requests)
        requests = (replace(asked, allocated=parts) for asked, parts in zip(self.requests, shared, strict=True))
        return replace(self, requests=tuple(requests))

    def _asked_twice(self, random: Random, profile: Profile) -> Scenario:
        """In some schedules there is another decode engine, which asks for some of the requests too."""
        if random.random() >= profile.others:
            return self
        fleet = random.choice([self.fleets["d"], replace(_fleet(random), pages=self.fleets["d"].pages)])
        requests = (
            replace(asked, other_s=asked.begin_s[1] + random.choice([0.0, random.uniform(0, 0.1)]))
            if random.random() < OTHER_ASKS
            else asked
            for asked in self.requests
        )
        faults = () if self.calm or (self.faults and profile.replaced) else _faults_of(random, profile, OTHER, fleet)
        config = replace(self.config, deadline_s=2 * CALM_S) if self.calm else self.config  # twice as much is copied
        fleets = {**self.fleets, OTHER: fleet}
        return replace(self, fleets=fleets, config=config, requests=tuple(requests), faults=(*self.faults, *faults))

    @property
    def digests(self) -> bool:
        return self.config.integrity is Integrity.DIGEST


def _fleet(random: Random, grids: Sequence[tuple[int, int, int]] = GRIDS) -> Fleet:
    return Fleet(*random.choice(grids), page_tokens=random.choice([2, 4]), cp_order=random.choice(list(CpOrder)))


def _own_pages(random: Random, fleet: Fleet) -> Fleet:
    """The same fleet, whose compressed rows and windows have pages of their own sizes."""
    return replace(fleet, pages={"compressed": random.choice([1, 2, 5]), "sliding": random.choice([2, 3])})


def _config(random: Random, profile: Profile, calm: bool) -> MoverConfig:
    return MoverConfig(
        arena_bytes=256 * random.choice([2, 3, 5, 8, 16, 32]),
        sandbox_bytes=0,
        deadline_s=CALM_S if calm else random.choice(profile.deadlines_s),
        drain_s=0.3,
        ping_s=0.3,
        resend_s=0.2,
        silence_s=profile.silence_s,
        lease_s=0.8,
        linger_s=2.2,
        backoff=Backoff(0.1, 0.5),
        costs=Costs(1.0, 1e3, 1e3, 1e3, 10.0, chunk_bytes=random.choice([128, 128, 256, 512, 1024])),
        route=random.choice(profile.routes),
        verb=random.choice(profile.verbs),
        replicas=random.choice(list(Replicas)),
        chunk_layers=random.choice([0, 0, 1]),
        integrity=random.choice(profile.integrity),
    )


def _request(random: Random, profile: Profile, name: str, sources: int, calm: bool) -> Asked:
    tokens = random.randint(*profile.tokens)
    first = random.uniform(0, 0.3)
    begin = first + random.choice([0, random.uniform(0, 0.3)]), first + random.choice([0, random.uniform(0, 0.3)])
    begin = begin[0] + profile.ahead_s, begin[1]
    start, steps = random.choice([0, 0, 0, random.randint(0, tokens)]), _steps(random, tokens)
    asked = Asked(
        name,
        tokens,
        start,
        begin,
        steps,
        _shares(random, len(steps)),
        tuple(random.sample(range(sources), random.randint(1, sources))) if random.random() < 0.3 else (),
        random.choice([0.0, random.uniform(0, 0.3)]),
    )
    if calm:
        return asked
    abort = (random.choice(ENGINES), first + random.uniform(0, 0.5)) if random.random() < 0.4 else None
    ambush = random.choice([0, 0, 0, 1, 1, 2, 3, 5]) if random.random() < profile.ambushes else None
    retries, again = random.choice([0, 1, 2]), random.random() < 0.3
    return replace(asked, abort=abort, ambush=ambush, refused=random.random() < 0.04, retries=retries, again=again)


def _steps(random: Random, tokens: int) -> tuple[Step, ...]:
    return random.choice([(), (), _by_layers(random), _by_tokens(random, tokens)])


def _shares(random: Random, steps: int) -> tuple[float, ...]:
    """A table that is named part by part, ahead of what is computed or behind it; the last step names the rest."""
    if not steps or random.random() < 0.4:
        return ()
    return (*sorted(random.choice([0.0, random.random(), 1.0]) for _ in range(steps)), 1.0)


def _by_layers(random: Random) -> tuple[Step, ...]:
    """A prefill that computes layer by layer."""
    first, last = sorted(random.uniform(0, 0.4) for _ in range(2))
    return Step(first, layers=1), Step(last)


def _by_tokens(random: Random, tokens: int) -> tuple[Step, ...]:
    """A prefill in chunks, of which the last comes layer by layer."""
    times = sorted(random.uniform(0, 0.4) for _ in range(3))
    return Step(times[0], tokens=random.randint(1, tokens)), Step(times[1], layers=1), Step(times[2])


def _parts(random: Random) -> tuple[tuple[float, float], ...]:
    """When a destination has which share of its pages; the last time all."""
    times = sorted(random.choice([0.0, random.uniform(0, 0.5)]) for _ in range(random.choice([1, 2, 3])))
    shares = sorted(random.choice([0.0, random.random()]) for _ in times[1:])
    return tuple(zip(times, (*shares, 1.0), strict=True))


def _faults_of(random: Random, profile: Profile, engine: str, fleet: Fleet) -> list[Fault]:
    """Ranks of one engine that die, or are stopped."""
    faults = list[Fault]()
    for rank in range(fleet.size):
        if random.random() < profile.crashes:
            back = None if random.random() < 0.15 else random.uniform(0.02, 0.6)
            at_s, told = random.uniform(0, 0.9), random.random() < 0.6
            faults.append(Crash((engine, rank), at_s, back, told, back is None and random.random() < 0.7))
        if random.random() < profile.stops:
            seconds = random.choice([random.uniform(0.02, 0.3), random.uniform(*profile.long_stop_s)])
            faults.append(Stop((engine, rank), random.uniform(0, 0.8), seconds))
    return faults


def _faults(random: Random, profile: Profile, fleets: dict[str, Fleet]) -> list[Fault]:
    if profile.replaced and random.random() < profile.replaced:  # and nothing else: it must be heard of again
        engine = random.choice(ENGINES)
        after, told = random.uniform(1.6, 2.2), random.random() < 0.5
        rank = engine, random.randrange(fleets[engine].size)
        return [Replace(rank, random.uniform(0, 0.6), after, after + random.uniform(0.1, 1.0), told)]
    faults = list[Fault]()
    for engine, fleet in fleets.items():
        faults += _faults_of(random, profile, engine, fleet)
    if random.random() < 0.2:
        ranks = random.randrange(fleets["p"].size), random.randrange(fleets["d"].size)
        seconds = None if random.random() < 0.25 else random.uniform(0.1, 1.5)
        faults.append(Cut(ranks, random.uniform(0, 0.6), seconds, random.random() < 0.5))
    return faults
