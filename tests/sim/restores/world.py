"""Ranks that restore prompts together under a seeded schedule of slow, short, spoilt and failing tiers.

Rounds come at even times, as schedulers of one engine make them; storage and copies go on in between. After every round
the books of every rank are recomputed, and ranks are held against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmover.cache.ledger import FaultPolicy, Ledger, Loss
from kvmover.cache.prefix import FULL, Tier
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.tiers import BestEffort, CostAware, Restore, RestorePhase, Wait
from kvmover.errors import KvmoverError
from kvmover.store import Got
from tests.sim.network import SimNetwork
from tests.sim.restores.parts import SimRank
from tests.sim.restores.scenario import HYBRID, PAGE, PROFILES, TEXTS, Asked, Evict, Scenario
from tests.sim.scene import Broken

ROUND_S = 0.02
#: No schedule has more rounds, so what is still open then never ends.
ROUNDS = 1200


@dataclass(eq=False)
class Request:
    """One prompt on all ranks. `borrowed`: pages that keep its short rank short."""

    name: str
    asked: Asked
    hashes: list[bytes]
    began: int
    restores: list[Restore]
    known_pages: int
    borrowed: list[tuple[str, Tier, list[int]]] = field(default_factory=list[tuple[str, Tier, list[int]]])
    ready: int | None = None
    aborted: int | None = None

    @property
    def prompt(self) -> list[int]:
        return TEXTS[self.asked.text][: self.asked.tokens]


class World:
    """One schedule. `run` raises Broken at the first round after which an invariant does not hold."""

    def __init__(self, seed: int, profile: str = "default", trace: bool = False) -> None:
        self.profile = PROFILES[profile]
        self.scenario = scenario = Scenario.draw(seed, self.profile)
        self.network = SimNetwork(seed)
        self.network.trace = [] if trace else None
        self.network.log(lambda: f"{scenario}")
        self.names = {(text, at): page for text, words in enumerate(TEXTS) for at, page in enumerate(_hashes(words))}
        self.ranks = [SimRank(rank, scenario, self.network, seed, self.names) for rank in range(scenario.ranks)]
        for rank in self.ranks:
            rank.worker.stepped = lambda rank=rank: self._untouched(rank)
        self.ledgers = [Ledger(FaultPolicy.RAISE) for _ in self.ranks]
        self.seen = Counter[str]()
        self.round = 0
        self.open: list[Request] = []
        self.computed = {text: scenario.stored[text] // PAGE for text in range(len(TEXTS))}
        self._due = sorted(scenario.requests, key=lambda asked: asked.at)
        self._evictions = sorted(scenario.evictions, key=lambda evict: evict.at)
        self._late: dict[Restore, int] = {}
        self._uneven = False
        self._pages: list[tuple[int, ...]] = [()] * scenario.ranks
        self._said = ""

    def run(self) -> World:
        self.network.after(ROUND_S, self._calls)
        while self.network.pending:
            self.network.step()
        self._end()
        return self

    def _calls(self) -> None:
        """The engine calls, and some time later all ranks meet: storage does not wait for that."""
        self.round += 1
        if self.round > ROUNDS:
            raise Broken(f"still busy after {ROUNDS} rounds: {[r.restores[0].state for r in self.open]}")
        self._engine()
        self.network.after(ROUND_S / 2, self._round)

    def _round(self) -> None:
        agreed = np.min([rank.controller.votes() for rank in self.ranks], axis=0)
        for rank in self.ranks:
            rank.controller.settle(agreed)
        for request in list(self.open):
            self._follow(request)
        self._say()
        for number, rank in enumerate(self.ranks):
            self._look(number, rank)
        if self._due or self._evictions or self.open or self._uneven or not self._idle:
            self.network.after(ROUND_S / 2, self._calls)

    # The engine: the same calls on every rank, in the same order.

    def _engine(self) -> None:
        if self._uneven:
            self._even_out()
        while self._evictions and self._evictions[0].at <= self.round and not self._uneven:
            self._evict(self._evictions.pop(0))
        for request in list(self.open):
            age = self.round - request.began
            if request.asked.want == age and request.ready is None:
                for rank, restore in self._parts(request):
                    rank.controller.want(restore)
            if request.asked.abort == age and request.ready is None:
                self._abort(request)
            elif request.ready is not None and self.round - request.ready >= request.asked.held:
                self._release(request)
        while self._due and self._due[0].at <= self.round and self._may_begin(self._due[0]):
            self._begin(self._due.pop(0))

    def _may_begin(self, asked: Asked) -> bool:
        """One that finds a rank short is alone, so that all ranks evict alike."""
        return not self._uneven and (not asked.alone or (not self.open and self._idle))

    @property
    def _idle(self) -> bool:
        return all(rank.controller.idle for rank in self.ranks)

    def _even_out(self) -> None:
        """A rank that fell short has used its tree in another order: they begin anew, so that all evict alike."""
        if not self.open and self._idle:
            self._uneven = False
            for tier in (Tier.DEVICE, Tier.HOST):
                self._evict(Evict(0, 1000, tier))
            if any(len(rank.tree) for rank in self.ranks):
                raise Broken(f"trees have {[len(rank.tree) for rank in self.ranks]} nodes that nobody uses")

    def _evict(self, evict: Evict) -> None:
        for name in self.scenario.model:
            rooms = {rank.controller.allocator.room(name, evict.tier) for rank in self.ranks}
            if len(rooms) > 1 and evict.pages < 1000:
                raise Broken(f"ranks have room for {rooms} pages of {name}")
            for rank in self.ranks:
                room = rank.controller.allocator.room(name, evict.tier)
                ids = rank.controller.allocator.take(name, evict.tier, min(evict.pages, room))
                rank.controller.allocator.give(name, evict.tier, ids or [])

    def _begin(self, asked: Asked) -> None:
        name = f"r{len(self._due)}"
        borrowed = self._shorten(asked) if asked.alone else []
        prompt = TEXTS[asked.text][: asked.tokens]
        pages = min(self.computed[asked.text], max(0, asked.tokens - 1) // PAGE)
        restores = [rank.controller.restore(prompt) for rank in self.ranks]
        request = Request(name, asked, _hashes(prompt), self.round, restores, pages, borrowed)
        self.open.append(request)
        self.seen["alone" if asked.alone else "begun"] += 1

    def _shorten(self, asked: Asked) -> list[tuple[str, Tier, list[int]]]:
        """Nothing unlocked is left on the tier, and one rank has few free pages there."""
        tier, borrowed = asked.short_tier, list[tuple[str, Tier, list[int]]]()
        for down in (Tier.DEVICE, tier):
            self._evict(Evict(0, 1000, down))
        self._uneven = True
        rank = self.ranks[asked.short_rank]
        free = rank.controller.allocator.free[FULL, tier]
        ids = rank.controller.allocator.take(FULL, tier, max(0, len(free) - asked.short_pages)) or []
        rank.out[FULL, tier].update(ids)
        borrowed.append((FULL, tier, ids))
        return borrowed

    def _abort(self, request: Request) -> None:
        self.seen[f"aborted in {request.restores[0].phase}"] += 1
        for number, (rank, restore) in enumerate(self._parts(request)):
            rank.controller.abort(restore)
            self.ledgers[number].matched(request.name, len(request.prompt), restore.reusable_tokens, 0.0)
            self.ledgers[number].aborted(request.name, 1.0)
        request.aborted = self.round
        self._over(request)

    def _follow(self, request: Request) -> None:
        """What all ranks must say alike."""
        said = {(restore.phase, restore.tokens) for restore in request.restores if restore.done}
        if len(said) > 1 or (said and not all(restore.done for restore in request.restores)):
            raise Broken(f"{request.name}: ranks say {[(r.phase, r.tokens) for r in request.restores]}")
        if said and request.ready is None:
            request.ready = self.round
            self._ready(request)

    def _ready(self, request: Request) -> None:
        for number, (rank, restore) in enumerate(self._parts(request)):
            self._bytes(request, rank, restore)
            self._reasons(request, rank, restore)
            self.ledgers[number].matched(request.name, len(request.prompt), restore.reusable_tokens, 0.0)
            self.ledgers[number].admitted(request.name, restore.credit, restore.lost)
            self.seen.update({f"lost {loss}": 1 for loss in restore.lost})
        first = request.restores[0]
        self.seen.update({f"from {tier}": 1 for tier in ("device", "host", "storage", "peer") if _credit(first, tier)})
        if not request.asked.alone:
            self._compute(request)

    def _compute(self, request: Request) -> None:
        """The rest of the prompt, where there is room for it."""
        hashes, first = request.hashes, request.restores[0].tokens // PAGE
        taken = [rank.controller.take(len(hashes) - first) for rank in self.ranks]
        if any((ids is None) != (taken[0] is None) for ids in taken):
            raise Broken("one rank has room to compute, and another has not")
        if taken[0] is None or not hashes[first:]:
            return
        for rank, fresh in zip(self.ranks, taken, strict=True):
            assert fresh is not None
            held = dict[str, list[int]]()
            for page, page_hash in zip(fresh, hashes[first:], strict=True):
                rank.contents[FULL, Tier.DEVICE][page] = page_hash
            for name in list(self.scenario.model)[1:]:
                count = 1 if name == "state" else len(hashes) - first
                ids = rank.controller.take(count, name)
                if ids is not None:
                    for page, page_hash in zip(ids, hashes[-count:], strict=True):
                        rank.contents[name, Tier.DEVICE][page] = page_hash
                    held[name] = ids
            rank.controller.keep(request.prompt, fresh, first_page=first, held=held)
        self.computed[request.asked.text] = max(self.computed[request.asked.text], len(hashes))

    def _release(self, request: Request) -> None:
        for number, (rank, restore) in enumerate(self._parts(request)):
            rank.controller.release(restore)
            if not request.asked.alone:
                self.ledgers[number].computed(request.name, len(request.prompt) - restore.tokens)
            self.ledgers[number].aborted(request.name, 1.0)
        self._over(request)

    def _over(self, request: Request) -> None:
        self.open.remove(request)
        for name, tier, ids in request.borrowed:
            rank = self.ranks[request.asked.short_rank]
            rank.controller.allocator.give(name, tier, ids)
            rank.out[name, tier].difference_update(ids)

    def _parts(self, request: Request) -> Iterator[tuple[SimRank, Restore]]:
        return zip(self.ranks, request.restores, strict=True)

    # The invariants.

    def _look(self, number: int, rank: SimRank) -> None:
        """Of one rank, after every round: states and operations, and all pages where any has changed hands."""
        controller = rank.controller
        controller._restores.check()
        controller._backups.check()
        controller.collectives.check()
        pages = *map(len, controller.allocator.free.values()), len(rank.tree)
        if pages != self._pages[number]:
            self._pages[number] = pages
            rank.check()
            self.ledgers[number].check()
        self._untouched(rank)
        self._patience(rank)
        self._one_engine(rank)

    def _untouched(self, rank: SimRank) -> None:
        """What a request was given stays what it is until it is given back."""
        for request in self.open:
            if request.ready is not None:
                self._bytes(request, rank, request.restores[rank.number])

    def _bytes(self, request: Request, rank: SimRank, restore: Restore) -> None:
        count = restore.tokens // PAGE
        given = [(FULL, restore.page_ids.tolist(), request.hashes[:count])]
        for name, ids in restore.held:
            given.append((name, ids.tolist(), request.hashes[count - len(ids) : count]))
            least = 0 if not count else 1 if name == "state" else min(count, -(-(HYBRID["swa"] or 0) // PAGE))
            if len(ids) < least:
                raise Broken(f"{request.name}: {len(ids)} pages of {name} for a prefix of {count}")
        for name, ids, hashes in given:
            there = [rank.contents[name, Tier.DEVICE][page] for page in ids]
            if there != hashes:
                raise Broken(f"rank {rank.number}: pages {ids} of {name} are not what {request.name} was given")

    def _patience(self, rank: SimRank) -> None:
        """Who has waited for long enough, or was given up, has said so to all."""
        restores, now = rank.controller._restores, self.network.now
        for restore in restores.open:
            state = restore.state
            if state.phase is not RestorePhase.READ or restore.collective is None or restore.collective.stopping:
                continue
            late = state.patience_s is not None and now > state.began_s + state.patience_s
            if late or (state.wanted and isinstance(self.scenario.policy.prefetch, BestEffort)):
                since = self._late.setdefault(restore, self.round)
                if self.round > since + 2:
                    raise Broken(f"a read goes on after its time is up: {state}")
        for restore in restores.leaving:
            if restore.collective is not None and not restore.collective.stop:
                raise Broken(f"a restore was given up, and goes on: {restore.state}")

    def _one_engine(self, rank: SimRank) -> None:
        """All ranks that read a request's pages from peers read one engine, which waits for all of them."""
        if rank.peers is not None:
            first = self.ranks[0].peers.read_from
            for read, engine in rank.peers.read_from.items():
                if first.get(read, engine) != engine:
                    raise Broken(f"{read}: rank {rank.number} reads {engine}, rank 0 {first[read]}")

    def _reasons(self, request: Request, rank: SimRank, restore: Restore) -> None:
        """Each loss is one that this schedule has a cause for."""
        policy, others = self.scenario.policy, [each for each in request.restores if each is not restore]
        disk = rank.served
        may = {
            Loss.POISONED: Got.POISONED in disk,
            Loss.READ_FAILED: rank.worker.raised or (rank.peers is not None and rank.peers.failed),
            Loss.LATE: not isinstance(policy.prefetch, Wait),
            Loss.THRESHOLD: policy.least_tokens > 1
            or policy.least_load_tokens > 1
            or isinstance(policy.prefetch, CostAware),
            Loss.HOST_CAPACITY: not self.profile.roomy,
            Loss.DEVICE_CAPACITY: not self.profile.roomy,
            Loss.CAPACITY_EVICTED: not self.profile.roomy,
            Loss.RANK_MINIMUM: any(_own(each) or each.reusable_tokens < restore.reusable_tokens for each in others)
            or any(_asked(each) != _asked(restore) for each in others)
            or (self.scenario.model == HYBRID and bool(others)),
        }
        for loss in restore.lost:
            if not may[loss]:
                raise Broken(f"{request.name}: rank {rank.number} lost {restore.lost}, and nothing explains {loss}")
        if isinstance(policy.prefetch, BestEffort) and restore.lost.get(Loss.LATE) and not restore.state.wanted:
            raise Broken(f"{request.name}: late, and nobody wanted it")
        if self.profile.roomy and restore.lost:
            raise Broken(f"{request.name}: lost {restore.lost} where nothing goes wrong")
        if self.profile.roomy and len(self.scenario.model) == 1 and restore.tokens < request.known_pages * PAGE:
            raise Broken(f"{request.name}: {restore.tokens} tokens came back of {request.known_pages} pages")

    def _end(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.check()
            self.ledgers[number].check()
            tree, allocator = rank.tree, rank.controller.allocator
            for (name, tier), free in allocator.free.items():
                sizes = tree.sizes(name, tier)
                if len(free) + sizes.evictable + sizes.protected != free.pages:
                    raise Broken(f"{name} on {tier.name}: {len(free)} free, {sizes} of {free.pages} at the end")
            if tree._forest.locked_paths or len(self.ledgers[number]):
                raise Broken(f"rank {number} keeps {len(tree._forest.locked_paths)} locks for ever")
        if len({rank.controller.collectives.serial for rank in self.ranks}) > 1:
            raise Broken("ranks have begun different numbers of operations")

    def _say(self) -> None:
        if self.network.trace is None:
            return
        text = "; ".join(
            f"{request.name} " + " ".join(f"{r.phase}/{r.state.asked}/{r.state.op_pages}" for r in request.restores)
            for request in self.open
        )
        if text != self._said:
            self._said = text
            self.network.log(lambda: f"round {self.round}: {text}")


def _asked(restore: Restore) -> tuple[str, ...]:
    """The engines of which this rank had heard."""
    return restore.question.engines if restore.question is not None else ()


def _own(restore: Restore) -> int:
    """Tokens that a rank fell short of by itself."""
    return sum(tokens for loss, tokens in restore.state.reasons.items() if loss is not Loss.RANK_MINIMUM)


def _credit(restore: Restore, tier: str) -> int:
    return getattr(restore.credit, f"{tier}_tokens")


def _hashes(tokens: Sequence[int]) -> list[bytes]:
    return chain(b"", np.array(tokens, np.uint32), PAGE)


def simulate(seed: int, profile: str = "default", trace: bool = False) -> World:
    """Run one schedule. Raises Broken, with the command that shows it again."""
    world: World | None = None
    try:
        world = World(seed, profile, trace)
        return world.run()
    except (Broken, KvmoverError, AssertionError) as error:
        lines = "\n".join(world.network.trace or []) if world else ""
        replay = f"python -m tests.sim.restores.replay {seed} {profile}"
        raise Broken(f"{lines}\nseed {seed}, profile {profile}: {error!r} (replay: {replay})") from error
