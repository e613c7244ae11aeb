"""One rank's memory, disk, storage thread and copies, simulated: every page says what is in it, every step takes time.

Tree, controller, restores and the jobs of storage are the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from kvmover.cache.peers import PeerAnswer, PeerMiss, PeerQuestion, PeerRead, PeerTerms
from kvmover.cache.peers.questions import question_of
from kvmover.cache.prefix import FULL, PrefixTree, SlidingWindow, State, Tier
from kvmover.cache.prefix.columns import ID_BYTES
from kvmover.cache.tiers import Controller, ControllerConfig, FreeList, LocalConsensus, Rule, Speed
from kvmover.cache.tiers.host_memory import SOLE
from kvmover.cache.tiers.layerwise_copier import Batch
from kvmover.cache.tiers.tier_storage import Ended, PageRef, StorageJob, StorageLookup, StorageRead, Urgency
from kvmover.store import Got, GotResult
from tests.sim.network import SimNetwork
from tests.sim.restores.scenario import PAGE, Disk, Scenario
from tests.sim.scene import Broken

Contents = dict[tuple[str, Tier], list[bytes]]
GARBAGE = b"garbage"
CPU = SimpleNamespace(type="cpu")


class DiskError(Exception):
    """What a broken disk raises."""


@dataclass(eq=False)
class SimPool:
    """A tiered pool without tensors: page counts alone, and a byte a page."""

    name: str
    rule: Rule
    pages: tuple[int, int]
    share: Any = SOLE
    part: Any = field(default_factory=lambda: SimpleNamespace(nbytes=PAGE))

    @property
    def device(self) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(pages=self.pages[0]), tensors=[SimpleNamespace(device=CPU)])

    @property
    def host(self) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(pages=self.pages[1]), tensors=[])

    def mine(self, ids: Sequence[int]) -> list[int]:
        return list(range(len(ids)))


@dataclass(eq=False)
class SimStoredPool:
    """One component on a rank's disk. `served`: the outcomes other than READ that it gave."""

    tiered_pool: SimPool
    contents: Contents
    has: set[bytes]
    bad: set[bytes]
    vanishing: set[bytes]
    served: set[Got]
    written: int = 0

    @property
    def view(self) -> SimStoredPool:
        return self

    def exists(self, hashes: Sequence[bytes]) -> list[bool]:
        there = [page in self.has for page in hashes]
        self.has -= self.vanishing
        return there

    def get(self, pages: Sequence[PageRef]) -> list[GotResult]:
        return [self._get(page) for page in pages]

    def _get(self, page: PageRef) -> GotResult:
        got = Got.READ if page.page_hash in self.has else Got.ABSENT
        if got is Got.READ and page.page_hash in self.bad:
            got = Got.POISONED
            self.has.discard(page.page_hash)
        host = self.contents[self.tiered_pool.name, Tier.HOST]
        host[page.host_id] = page.page_hash if got is Got.READ else GARBAGE
        if got is not Got.READ:
            self.served.add(got)
        return GotResult(got)

    def put(self, pages: Sequence[PageRef]) -> list[bool]:
        host = self.contents[self.tiered_pool.name, Tier.HOST]
        for page in pages:
            if host[page.host_id] != page.page_hash:
                raise Broken(f"{self.tiered_pool.name} page {page.host_id} is stored, and is not what it is stored as")
        fresh = {page.page_hash for page in pages} - self.has
        self.has |= fresh
        self.written = len(fresh)
        return [True] * len(pages)


class Known:
    """Speeds that are known beforehand: what is measured of a simulated disk is the test machine's."""

    def __init__(self, speed: Speed | None) -> None:
        self._speed = speed

    def add(self, nbytes: int, seconds: float) -> None:
        pass

    def speed(self) -> Speed | None:
        return self._speed


class SimWorker:
    """The storage thread: a step takes time, the more urgent job goes first, and what ended is told at a poll."""

    def __init__(self, network: SimNetwork, random: Random, disk: Disk) -> None:
        self._network, self._random, self._disk = network, random, disk
        self._queues: tuple[deque[tuple[StorageJob, Ended]], ...] = tuple(deque() for _ in Urgency)
        self._over: deque[tuple[Ended, Exception | None]] = deque()
        self._busy, self._jobs = False, 0
        self.raised = False
        self.stepped: Callable[[], None] = lambda: None

    def begin(self, job: StorageJob, urgency: Urgency, ended: Ended) -> None:
        self._queues[urgency].append((job, ended))
        if not self._busy:
            self._busy = True
            self._network.after(self._random.uniform(*self._disk.step_s), self._step)

    def poll(self) -> None:
        while self._over:
            ended, error = self._over.popleft()
            ended(error)

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues)) + len(self._over)

    def _step(self) -> None:
        urgency = next(urgency for urgency in Urgency if self._queues[urgency])
        job, ended = self._queues[urgency][0]
        stopped, before = isinstance(job, StorageRead) and job.stopping(), job.nbytes
        error, over = None, False
        try:
            self._fail(job)
            over = job.step()
        except DiskError as raised:
            error, over = raised, True
        if stopped and job.nbytes > before:
            raise Broken("a read that was told to stop reads on")
        if over:
            self._queues[urgency].popleft()
            self._over.append((ended, error))
        self._busy = any(self._queues)
        if self._busy:
            self._network.after(self._random.uniform(*self._disk.step_s), self._step)
        self.stepped()

    def _fail(self, job: StorageJob) -> None:
        """Raise where it is a broken disk's turn."""
        if isinstance(job, (StorageLookup, StorageRead)):
            self._jobs += 1
            if self._jobs in self._disk.fails:
                self.raised = True
                raise DiskError("the disk fails")


class SimCopier:
    """Copies between device and host that land some time after they were begun, a component at a time."""

    def __init__(self, network: SimNetwork, random: Random, contents: Contents) -> None:
        self._network, self._random, self._contents = network, random, contents
        self._over: deque[Callable[[], None]] = deque()

    def begin(self, batches: Sequence[Batch], dst: Tier, done: Callable[[], None]) -> None:
        left = list(batches)

        def land() -> None:
            if left:
                self._copy(left.pop(0), dst)
                self._network.after(self._random.uniform(0.0, 0.02), land)
            else:
                self._over.append(done)

        self._network.after(self._random.uniform(0.0, 0.02), land)

    def at_once(self, batches: Sequence[Batch], dst: Tier) -> None:
        for batch in batches:
            self._copy(batch, dst)

    def poll(self) -> None:
        while self._over:
            self._over.popleft()()

    def check(self) -> None:
        pass

    def _copy(self, batch: Batch, dst: Tier) -> None:
        name = batch.tiered_pool.name
        host, device = self._contents[name, Tier.HOST], self._contents[name, Tier.DEVICE]
        for host_id, device_id in zip(batch.host_ids, batch.device_ids, strict=True):
            if dst is Tier.DEVICE:
                device[device_id] = host[host_id]
            else:
                host[host_id] = device[device_id]


class SimPeers:
    """A rank's tier of peers: what other engines have comes after some time, or does not, or comes late.

    `lent`: by page of the host, what this rank has promised is in it. `read_from`: engines read, by request and number.
    """

    def __init__(
        self, number: int, scenario: Scenario, network: SimNetwork, random: Random, contents: Contents, names: Any
    ) -> None:
        self._number, self._network, self._random, self._began_s = number, network, random, network.now
        self._lenders = {f"lender {each}": lender for each, lender in enumerate(scenario.lenders)}
        self._host, self._names = contents[FULL, Tier.HOST], names
        self.terms = PeerTerms(most_asked=3)
        self.read_from: dict[tuple[str, int], str] = {}
        self.lent: dict[int, bytes] = {}
        self.offers: dict[str, Any] = {}
        self._over: deque[Callable[[], None]] = deque()
        self._reads: list[tuple[PeerRead, list[int]]] = []
        self._count, self.failed, self._looks = 0, False, 0

    def question(self, request: str, page_hash: bytes, source: str | None = None) -> PeerQuestion:
        since_s = self._network.now - self._began_s
        heard = [name for name, lender in self._lenders.items() if lender.heard_s[self._number] <= since_s]
        return question_of(request, page_hash, heard, self.terms.most_asked, source)

    def look(self, question: PeerQuestion, prefix: Any, ended: Callable[[Sequence[PeerAnswer]], None]) -> None:
        hashes, self._looks = prefix.key.page_hashes(PAGE), self._looks + 1
        self.offers[question.request] = hashes
        asked = [self._lenders[engine] for engine in question.engines]
        answers = list[PeerAnswer]()
        for lender in asked:
            has = {page for (text, at), page in self._names.items() if at < lender.tokens[text] // PAGE}
            pages = next((at for at, page in enumerate(hashes) if page not in has), len(hashes))
            known = pages * PAGE > prefix.first_tokens
            answers.append(
                PeerAnswer(min(pages * PAGE, prefix.limit_tokens)) if known else PeerAnswer(0, PeerMiss.ABSENT)
            )

        def over() -> None:
            self._looks -= 1
            ended(answers)

        slowest = max((each.step_s for each in asked), default=(0.0, 0.0))
        self._network.after(self._random.uniform(*slowest), lambda: self._over.append(over))

    def read(self, question: PeerQuestion, source: int, positions: range, tables: Any, read: PeerRead) -> None:
        engine = self.read_from[question.request, source] = question.engines[source]
        lender, self._count = self._lenders[engine], self._count + 1
        pages = range(positions.start // PAGE, positions.stop // PAGE)
        ids, hashes = [tables[0][page] for page in pages], self.offers[question.request]
        fails = self._count in lender.fails[self._number]
        read.transfer = SimpleNamespace(ended=False, quarantined=False)  # type: ignore[assignment]

        def land() -> None:
            good = not (fails or read.stopping())
            self.failed |= fails
            for page, page_id in zip(pages, ids, strict=True):
                self._host[page_id] = hashes[page] if good else GARBAGE
            read.transfer.ended, read.transfer.quarantined = True, not good and lender.late_s > 0  # type: ignore[union-attr]
            if read.transfer.quarantined:  # type: ignore[union-attr]
                self._network.after(self._random.uniform(0, lender.late_s), late)
            outcome = PAGE * len(pages) if good else OSError("the lender is gone")
            self._over.append(lambda: self._ended(read, outcome))

        def late() -> None:
            for page_id in ids:
                self._host[page_id] = GARBAGE
            read.transfer.quarantined = False  # type: ignore[union-attr]

        self._reads.append((read, ids))
        self._network.after(self._random.uniform(*lender.step_s), land)

    def _ended(self, read: PeerRead, outcome: int | BaseException) -> None:
        self._reads = [each for each in self._reads if each[0] is not read]
        read.ended(outcome)

    def decline(self, question: PeerQuestion) -> None:
        self.offers.pop(question.request)

    def came(self, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        for page_hash, page_id in zip(hashes, ids, strict=True):
            self.lent[page_id] = page_hash

    def freed(self, ids: Sequence[int]) -> None:
        for page_id in ids:
            self.lent.pop(page_id, None)

    def poll(self) -> None:
        while self._over:
            self._over.popleft()()

    @property
    def queued(self) -> int:
        return self._looks + len(self._reads)

    def check(self) -> None:
        """What is lent is what was promised."""
        wrong = [page for page, what in self.lent.items() if self._host[page] != what]
        if wrong:
            raise Broken(f"rank {self._number} lends pages {wrong} of the host, which hold something else")


class SimRank:
    """One rank: a real controller over simulated parts. `out`: pages that the engine has, by component and tier."""

    def __init__(
        self, number: int, scenario: Scenario, network: SimNetwork, seed: int, names: Mapping[tuple[int, int], bytes]
    ) -> None:
        random, disk, self.number = Random(f"rank {number} of {seed}"), scenario.disks[number], number
        kinds: dict[str, Any] = {"swa": SlidingWindow(scenario.model.get("swa") or 1), "state": State()}
        components = [kinds[name] for name in scenario.model if name != FULL]
        self.tree = PrefixTree(PAGE, components=components, tiers=scenario.tiers)
        pools: list[Any] = [SimPool(name, Rule(reach), scenario.pages) for name, reach in scenario.model.items()]
        self.contents: Contents = {
            (pool.name, tier): [GARBAGE] * pool.pages[tier] for pool in pools for tier in (Tier.DEVICE, Tier.HOST)
        }
        self.served = set[Got]()
        storage: Any = SimpleNamespace(
            stored_pools=[self._stored(pool, scenario, disk, names) for pool in pools],
            batch_pages=2,
            reads=Known(scenario.speed),
        )
        config = ControllerConfig(scenario.policy, LocalConsensus(), clock=network.clock)
        lends = bool(scenario.lenders)
        self.peers: Any = SimPeers(number, scenario, network, random, self.contents, names) if lends else None
        self.controller = controller = Controller(self.tree, pools, storage, config, peers=self.peers)
        self.worker = SimWorker(network, random, disk)
        copier: Any = SimCopier(network, random, self.contents)
        parts = replace(controller._backups.parts, worker=self.worker)  # type: ignore[arg-type]
        controller.worker, controller._restores.parts, controller._backups.parts = self.worker, parts, parts  # type: ignore[assignment]
        controller.copies = controller.allocator.copies = copier
        controller._restores.loads = controller._restores.borrows = Known(None)  # type: ignore[assignment]
        self.out: dict[tuple[str, Tier], set[int]] = {key: set() for key in self.contents}
        for key, free in controller.allocator.free.items():
            self._spoil_what_is_free(key, free)
        if components:
            self._refuse_parts()

    def check(self) -> None:
        """Every page is in one place, and nobody writes one that is free."""
        self.controller.check(self.out)
        for (name, tier), free in self.controller.allocator.free.items():
            assert isinstance(free, FreeList)
            written = [page for page, what in enumerate(self.contents[name, tier]) if page in free and what != GARBAGE]
            if written:
                raise Broken(f"rank {self.number}: pages {written} of {name} on {tier.name} are free, and were written")

    def _stored(self, pool: SimPool, scenario: Scenario, disk: Disk, names: Mapping[tuple[int, int], bytes]) -> Any:
        def those(marked: frozenset[tuple[str, int, int]]) -> set[bytes]:
            return {names[text, at] for name, text, at in marked if name == pool.name and (text, at) in names}

        has = {page for (text, at), page in names.items() if at < scenario.stored[text] // PAGE}
        return SimStoredPool(
            pool, self.contents, has - those(disk.absent), those(disk.poisoned), those(disk.vanishing), self.served
        )

    def _refuse_parts(self) -> None:
        """Of a hybrid prefix, a read brings all or nothing: attention KV alone would only take room."""
        end = self.tree.end

        def ended(op: int, pages: int | None = None) -> Any:
            fetch = self.tree._fetches.get(op)
            if fetch is not None and pages is not None and 0 < pages < len(fetch.ids) // ID_BYTES:
                raise Broken(f"rank {self.number} keeps {pages} pages of a hybrid prefix, and not its end")
            return end(op, pages)

        self.tree.end = ended

    def _spoil_what_is_free(self, key: tuple[str, Tier], free: Any) -> None:
        """Who reads a page after it came back is found out."""
        give, row = free.give, self.contents[key]

        def spoiling(ids: Any) -> None:
            pages = list(ids)
            give(pages)
            for page in pages:
                row[page] = GARBAGE

        free.give = spoiling
