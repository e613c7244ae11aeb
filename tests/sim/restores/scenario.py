"""What a seed of restores is about, drawn as plain values: ranks, a model, tiers, requests, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from kvmover.cache.prefix import FULL, Tier, WriteBack, WriteThrough
from kvmover.cache.prefix.tree_config import Tiers
from kvmover.cache.tiers import BestEffort, CostAware, Prefetch, Speed, TierPolicy, Timeout, Wait

#: Tokens of a page. Texts share their first pages, so that requests meet on one path.
PAGE = 2
TEXTS = ([0] * 25, [0] * 10 + [1] * 15, [0] * 18 + [2] * 7, [3] * 25)
#: By name of the tree's component, how far back a prefix needs it in tokens (None: to the beginning).
PLAIN: dict[str, int | None] = {FULL: None}
HYBRID: dict[str, int | None] = {FULL: None, "swa": 5, "state": 1}


@dataclass(frozen=True, slots=True)
class Profile:
    """How much goes wrong. Probabilities: of a page to be `absent` or `poisoned` at one rank, `vanishing` between
    look-up and read, of a look-up or a read to fail, of a rank to be `slow` with all of it, of a schedule to have a
    rank that is `short` of pages; and of a request to be `dropped`.
    """

    name: str
    absent: float = 0.04
    poisoned: float = 0.03
    vanishing: float = 0.02
    failing: float = 0.04
    slow: float = 0.3
    short: float = 0.3
    dropped: float = 0.25
    roomy: bool = False
    lent: float = 0.0


DEFAULT = Profile("default")
#: Nothing goes wrong and there is room: what storage has comes back, and nothing is lost.
CALM = Profile("calm", 0, 0, 0, 0, slow=0.1, short=0, dropped=0, roomy=True)
#: Disks that lose, spoil and refuse.
ROTTEN = Profile("rotten", absent=0.12, poisoned=0.15, vanishing=0.1, failing=0.2)
#: Reads that are given up, by requests and by time.
HASTY = Profile("hasty", slow=0.8, dropped=0.6)
#: Ranks with less room than others.
SHORT = Profile("short", absent=0.0, poisoned=0.0, vanishing=0.0, failing=0.0, short=1.0, dropped=0.05)
#: Engines that lend what they have, die as they lend, and write late.
LENT = Profile("lent", short=0.1, lent=1.0)
PROFILES = {profile.name: profile for profile in (DEFAULT, CALM, ROTTEN, HASTY, SHORT, LENT)}


@dataclass(frozen=True, slots=True)
class Asked:
    """The first `tokens` of a text, at a round. `want` and `abort`: so many rounds later, if it is not done by then.

    `held`: for how many rounds it is computed. `alone`: once nothing else is open, all that is not locked has left
    `short_tier`, and rank `short_rank` has no more than `short_pages` pages there.
    """

    text: int
    tokens: int
    at: int
    want: int
    abort: int | None
    held: int
    alone: bool = False
    short_rank: int = 0
    short_tier: Tier = Tier.HOST
    short_pages: int = 0


@dataclass(frozen=True, slots=True)
class Evict:
    """The engine needs `pages` of a tier, at a round, for something else."""

    at: int
    pages: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Disk:
    """What a rank's storage does. Pages by (component, text, position). `step_s`: how long a batch takes.

    `fails`: the numbers of the jobs that raise, counted from the first.
    """

    absent: frozenset[tuple[str, int, int]]
    poisoned: frozenset[tuple[str, int, int]]
    vanishing: frozenset[tuple[str, int, int]]
    fails: frozenset[int]
    step_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Lender:
    """Another engine: so many tokens of each text, and for each rank which reads fail, and how.

    `step_s`: how long an answer takes, or a read. `fails`: numbers of reads, by rank, that bring nothing. `late_s`: for
    so long such a read may still write, 0 where it cannot. `heard_s`: the time at which each rank hears of the engine.
    """

    tokens: tuple[int, ...]
    step_s: tuple[float, float]
    fails: tuple[frozenset[int], ...]
    late_s: float
    heard_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`pages`: of the device and the host, for each component. `stored`: tokens of each text that storage has."""

    ranks: int
    model: dict[str, int | None]
    tiers: Tiers
    policy: TierPolicy
    speed: Speed | None
    pages: tuple[int, int]
    stored: tuple[int, ...]
    disks: tuple[Disk, ...]
    requests: tuple[Asked, ...]
    evictions: tuple[Evict, ...]
    lenders: tuple[Lender, ...] = ()

    @classmethod
    def draw(cls, seed: int, profile: Profile) -> Scenario:
        random = Random(f"restores {seed}")
        ranks, model = random.choice([1, 2, 2, 3]), random.choice([PLAIN, PLAIN, HYBRID])
        tiers = WriteBack() if random.random() < 0.25 else WriteThrough(random.choice([1, 1, 2]))
        if profile.lent:
            model, tiers = PLAIN, WriteThrough(1)
        pages = (100, 160) if profile.roomy else (random.randint(14, 24), random.randint(13, 30))
        policy = _policy(random)
        if profile.roomy:
            policy = replace(policy, prefetch=Wait(), least_tokens=1, least_load_tokens=1, reading_share=1.0)
        return cls(
            ranks,
            model,
            tiers,
            policy,
            random.choice([None, Speed(0.0, 1e3), Speed(0.0, 1e9)]),
            pages,
            tuple(random.choice([0, 8, 16, 24]) for _ in TEXTS),
            tuple(_disk(random, profile, model) for _ in range(ranks)),
            requests := _requests(random, profile, ranks),
            _evictions(random, profile, requests),
            tuple(_lender(random, ranks) for _ in range(random.randint(1, 3) if profile.lent else 0)),
        )


def _policy(random: Random) -> TierPolicy:
    prefetch: Prefetch = random.choice(
        [Wait(), Wait(), BestEffort(), Timeout(0.02, 0.0), Timeout(0.2, 1.0), CostAware(400.0)]
    )
    return TierPolicy(
        prefetch=prefetch,
        least_tokens=random.choice([1, 1, 5]),
        least_load_tokens=random.choice([1, 1, 5]),
        reading_share=random.choice([1.0, 1.0, 0.4]),
        writing_pages=random.choice([1000, 6]),
    )


def _disk(random: Random, profile: Profile, model: dict[str, int | None]) -> Disk:
    everything = [(name, text, at) for name in model for text in range(len(TEXTS)) for at in range(12)]

    def some(share: float) -> frozenset[tuple[str, int, int]]:
        return frozenset(each for each in everything if random.random() < share)

    step_s = (0.05, 0.3) if random.random() < profile.slow else (0.001, 0.02)
    fails = frozenset(number for number in range(30) if random.random() < profile.failing)
    return Disk(some(profile.absent), some(profile.poisoned), some(profile.vanishing), fails, step_s)


def _lender(random: Random, ranks: int) -> Lender:
    step_s = (0.05, 0.3) if random.random() < 0.3 else (0.001, 0.02)
    fails = tuple(frozenset(number for number in range(12) if random.random() < 0.2) for _ in range(ranks))
    tokens, late_s = tuple(random.choice([0, 8, 16, 24]) for _ in TEXTS), random.choice([0.0, 0.0, 0.5])
    comes_s = random.choice([0.0, 0.0, 0.2])
    return Lender(tokens, step_s, fails, late_s, tuple(random.uniform(0, comes_s) for _ in range(ranks)))


def _requests(random: Random, profile: Profile, ranks: int) -> tuple[Asked, ...]:
    found = list[Asked]()
    at = 0
    for _ in range(random.randint(3, 7)):
        at += random.choice([0, 0, 1, 4, 30])
        abort = random.choice([0, 1, 3, 6, 12, 20, 30]) if random.random() < profile.dropped else None
        tokens = random.choice([25, 25, random.randint(1, 25)])
        found.append(
            Asked(random.randrange(len(TEXTS)), tokens, at, random.choice([0, 2, 9]), abort, random.randint(0, 6))
        )
    if random.random() < profile.short:
        text, tier = random.randrange(len(TEXTS)), random.choice([Tier.DEVICE, Tier.HOST])
        short = Asked(text, 25, at + 1, 9, None, 1, True, random.randrange(ranks), tier, random.randint(0, 9))
        found.append(short)
    return tuple(found)


def _evictions(random: Random, profile: Profile, requests: tuple[Asked, ...]) -> tuple[Evict, ...]:
    """While requests are open, and at any time; in a calm schedule none."""
    if profile.roomy:
        return ()
    return tuple(
        Evict(
            random.choice([random.randint(0, 60), random.choice(requests).at + random.randint(0, 12)]),
            random.randint(1, 20),
            random.choice([Tier.DEVICE, Tier.HOST]),
        )
        for _ in range(random.randint(0, 8))
    )
