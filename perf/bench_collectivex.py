"""Equal layouts, nothing to convert: what the mover costs over raw NIXL with the same descriptors.

The geometry is that of CollectiveX's kv-transfer benchmark (SemiAnalysis InferenceX): an MLA latent of 61 layers x
1,408 B a token and GQA of 94 layers x K and V x 1,024 B, pages of 16 and of 64 tokens, random page tables that both
sides derive from one seed, pools twice as large as the request. Any byte's value follows from its place in the source's
pool.

A contender has five hooks: prepare (not in the time, but reported), post, wait, verify, close. `bulk` is one contiguous
read of as many bytes; `NIXL paged` has its descriptors and handles made beforehand and only posts them. kvmover is
timed from asking to landed: the request is planned, descriptors are made, and both sides talk, in that time.
`of_paged_prepared` counts the preparation of both: the descriptors and handles of raw NIXL, and kvmover's offer.

`python -m perf.bench_collectivex [--rounds 9] [--device cpu] [mla-64 ...]`, all cases by default.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import HOST, Route
from kvmover.transfer.config import Exports, MoverConfig
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import start_agent
from kvmover.transport.base import Memory, memory_of
from kvmover.transport.nixl import NixlTransport
from perf.record import RESULTS, Spread, write

SLACK, SEED, PAUSE_S, POISON = 2, 20_260_923, 50e-6, 0xEE
#: A word of the pattern is its number times this, modulo 2^64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ENGINES = ("prefill", "decode")

Words = npt.NDArray[np.uint64]
Side = Literal["prefill", "decode"]


class Shape(StrEnum):
    """What raw NIXL moves: the case's PAGES, each run a descriptor, or one RUN of as many bytes."""

    PAGES = "pages"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Case:
    """A request of `tokens` tokens in pages of `page_tokens`."""

    component: Component
    tokens: int
    page_tokens: int

    @property
    def pages(self) -> int:
        return self.tokens // self.page_tokens

    @property
    def planes(self) -> int:
        return self.component.layers * self.component.kv

    @property
    def run_bytes(self) -> int:
        """A page of one plane: what a descriptor carries."""
        return self.page_tokens * self.component.heads * self.component.row_bytes

    @property
    def nbytes(self) -> int:
        return self.planes * self.pages * self.run_bytes

    def table(self, engine: str) -> npt.NDArray[np.int64]:
        """The request's pages on one side: scattered over a pool of `SLACK` times as many."""
        return np.random.default_rng([SEED, ENGINES.index(engine)]).permutation(SLACK * self.pages)[: self.pages]

    def offsets(self, engine: str) -> npt.NDArray[np.int64]:
        """Byte offset of each descriptor in the pool, plane by plane."""
        planes = np.arange(self.planes)[:, None] * (SLACK * self.pages)
        return ((planes + self.table(engine)) * self.run_bytes).reshape(-1)


MLA = Component("latent", 61, 1, 1, 704, "bfloat16")
GQA = Component("attention", 94, 2, 4, 128, "bfloat16")
CASES = {
    "mla-64": Case(MLA, 2048, 64),
    "mla-16": Case(MLA, 2048, 16),
    "gqa-64": Case(GQA, 1024, 64),
    "gqa-16": Case(GQA, 1024, 16),
}


class Rank:
    """One process: a pool, a mover on it, and a NIXL agent beside it that knows nothing of movers."""

    def __init__(self, engine: Side, case: Case, device: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.case, self.engine = case, engine
        fleet = Fleet(page_tokens=case.page_tokens)
        shard = fleet.shard(case.component, 0, 1)
        spec = PoolSpec.dense(case.component, shard, SLACK * case.pages, case.page_tokens, "NHD")
        self.pool = Pool.shared(spec) if device == "cpu" else Pool.zeros(spec, device)
        self.memory: Memory = memory_of(self.pool.tensors[0])
        if engine == "prefill":
            words = np.arange(self.memory.nbytes // 8, dtype=np.uint64)
            np.multiply(words, GOLDEN, out=words)
            self.pool.tensors[0].copy_(torch.from_numpy(words.view(np.uint8)))
        else:
            self.pool.tensors[0].fill_(POISON)
        config = MoverConfig(arena_bytes=64 << 20, deadline_s=60.0, costs=HOST, exports=Exports.POOLS)
        place = Place(engine, fleet, 0)
        self.mover = Mover(NixlTransport(engine), Model("bench", (case.component,)), place, [self.pool], config)
        self.raw = start_agent(f"raw-{engine}", ["UCX"], 0)
        self.raw.nixl.register_memory([self._place()], self.memory.kind.value)
        self.handles: dict[str, Any] = {}
        self.sent: Any = None

    def _place(self) -> tuple[int, int, int, str]:
        return (self.memory.address, self.memory.nbytes, self.memory.device, "")

    def hello(self) -> tuple[bytes, bytes, Memory]:
        return self.mover.card, self.raw.nixl.get_agent_metadata(), self.memory

    def meet(self, metadata: bytes) -> str:
        return self.raw.nixl.add_remote_agent(metadata).decode()

    def prepare(self, name: str, verb: str, peer: str, theirs: Memory, shape: Shape) -> float:
        """Make a handle with all descriptors of the case, or one for as many contiguous bytes. Returns the seconds."""
        began = time.perf_counter()
        other = ENGINES[self.engine == ENGINES[0]]
        lists = [
            self.raw.nixl.prep_xfer_dlist(owner, self._runs(memory, engine, shape), memory.kind.value)
            for owner, memory, engine in (("", self.memory, self.engine), (peer, theirs, other))
        ]
        every = np.arange(1 if shape is Shape.RUN else self.case.planes * self.case.pages, dtype=np.int32)
        self.handles[name] = self.raw.nixl.make_prepped_xfer(verb, lists[0], every, lists[1], every, b"")
        return time.perf_counter() - began

    def _runs(self, memory: Memory, engine: str, shape: Shape) -> npt.NDArray[np.uint64]:
        offsets = np.zeros(1, np.int64) if shape is Shape.RUN else self.case.offsets(engine)
        table = np.empty((len(offsets), 3), np.uint64)
        table[:, 0] = memory.address + offsets
        table[:, 1] = self.case.nbytes if shape is Shape.RUN else self.case.run_bytes
        table[:, 2] = memory.device
        return table

    def run(self, name: str) -> float:
        """Post what was prepared, and wait for it."""
        began, nixl, handle = time.perf_counter(), self.raw.nixl, self.handles[name]
        state = nixl.transfer(handle)
        while state == "PROC":
            time.sleep(PAUSE_S)
            state = nixl.check_xfer_state(handle)
        assert state == "DONE", state
        return time.perf_counter() - began

    def send(self, request: str) -> float:
        pages, began = [self.case.table("prefill")], time.perf_counter()
        self.sent = self.mover.send(request, pages)
        return time.perf_counter() - began

    def sent_well(self) -> str:
        self.mover.wait([self.sent])
        return str(self.sent.landed().routes)

    def close(self) -> None:
        for handle in self.handles.values():
            handle.release()
        self.mover.close()


def serve(pipe: Connection, case: Case, device: str) -> None:
    """The source: does what it is told, and polls its mover meanwhile."""
    rank = Rank("prefill", case, device)
    while True:
        if pipe.poll(PAUSE_S):
            verb, arguments = pipe.recv()
            pipe.send(getattr(rank, verb)(*arguments))
            if verb == "close":
                return
        rank.mover.poll()


@dataclass(slots=True)
class Pair:
    """The destination is this process; `ask` calls a method of the source."""

    case: Case
    here: Rank
    pipe: Connection
    theirs: Memory
    peer: str
    us: str

    def ask(self, verb: str, *arguments: object) -> Any:
        self.pipe.send((verb, arguments))
        return self.pipe.recv()

    def poison(self) -> None:
        self.here.pool.tensors[0].fill_(POISON)

    def verify(self) -> None:
        """Every byte of the request is its source's, and no other byte was touched."""
        case, words = self.case, self.here.pool.tensors[0].cpu().numpy().view(np.uint64)
        length = case.run_bytes // 8
        pages: Words = words.reshape(case.planes, SLACK * case.pages, length)
        strangers = np.setdiff1d(np.arange(SLACK * case.pages), case.table("decode"))
        first = case.offsets("prefill").astype(np.uint64).reshape(case.planes, case.pages) // np.uint64(8)
        for plane in range(case.planes):
            due = (first[plane][:, None] + np.arange(length, dtype=np.uint64)) * GOLDEN
            assert np.array_equal(pages[plane][case.table("decode")], due), f"plane {plane} differs"
            assert (pages[plane][strangers] == np.uint64(0xEEEEEEEEEEEEEEEE)).all(), f"plane {plane}: a neighbour"


@contextmanager
def paired(case: Case, device: str) -> Iterator[Pair]:
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=serve, args=(far, case, device), daemon=True)
    process.start()
    here = Rank("decode", case, device)
    pipe.send(("hello", ()))
    card, metadata, theirs = pipe.recv()
    peer = here.meet(metadata)
    here.mover.connect(card)
    pair = Pair(case, here, pipe, theirs, peer, "")
    pair.us = pair.ask("meet", here.hello()[1])
    try:
        yield pair
    finally:
        pair.ask("close")
        process.join(30)
        here.close()


class Contender(Protocol):
    """`post` begins and `wait` ends the time that `wait` returns, in seconds; `prepare` returns its own."""

    pair: Pair

    def prepare(self) -> float: ...
    def post(self) -> None: ...
    def wait(self) -> float: ...
    def verify(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Raw:
    """NIXL without a mover: a read by the destination or a write by the source, of pages or of one run."""

    pair: Pair
    verb: Literal["READ", "WRITE"] = "READ"
    shape: Shape = Shape.PAGES
    name: str = field(init=False)
    took_s: float = 0.0

    def prepare(self) -> float:
        self.name, pair = f"{self.verb} {self.shape}", self.pair
        if self.verb == "READ":
            return pair.here.prepare(self.name, "READ", pair.peer, pair.theirs, self.shape)
        return pair.ask("prepare", self.name, "WRITE", pair.us, pair.here.memory, self.shape)

    def post(self) -> None:
        self.took_s = self.pair.here.run(self.name) if self.verb == "READ" else self.pair.ask("run", self.name)

    def wait(self) -> float:
        return self.took_s

    def verify(self) -> None:
        if self.shape is Shape.PAGES:
            self.pair.verify()

    def close(self) -> None:
        handles = self.pair.here.handles
        if self.name in handles:
            handles.pop(self.name).release()


@dataclass(slots=True)
class Moved:
    """A mover's request, by a route and a verb; the route is the costs' to choose where it is None."""

    pair: Pair
    verb: Verb = Verb.PUSH
    route: Route | None = None
    routes: str = ""
    _request: str = ""
    _transfer: Any = None

    def prepare(self) -> float:
        mover = self.pair.here.mover
        mover.configure(replace(mover.config, verb=self.verb, route=self.route))
        self._request = f"{time.monotonic_ns()}"
        return self.pair.ask("send", self._request)

    def post(self) -> None:
        case = self.pair.case
        pages = [case.table("decode")]
        self._transfer = self.pair.here.mover.receive(self._request, "prefill", range(case.tokens), pages)

    def wait(self) -> float:
        self.pair.here.mover.wait([self._transfer])
        result = self._transfer.landed()
        self.routes = "+".join(result.routes)
        return result.seconds

    def verify(self) -> None:
        self.pair.verify()

    def close(self) -> None:
        self.pair.ask("sent_well")


CONTENDERS: dict[str, Callable[[Pair], Contender]] = {
    "bulk": lambda pair: Raw(pair, shape=Shape.RUN),
    "NIXL paged, read": Raw,
    "NIXL paged, written": lambda pair: Raw(pair, "WRITE"),
    "kvmover direct, pulled": lambda pair: Moved(pair, Verb.PULL, Route.DIRECT),
    "kvmover direct, pushed": lambda pair: Moved(pair, Verb.PUSH, Route.DIRECT),
    "kvmover mapped, pulled": lambda pair: Moved(pair, Verb.PULL, Route.MAPPED),
    "kvmover mapped, pushed": lambda pair: Moved(pair, Verb.PUSH, Route.MAPPED),
    "kvmover auto, pulled": lambda pair: Moved(pair, Verb.PULL),
    "kvmover auto, pushed": lambda pair: Moved(pair, Verb.PUSH),
}
#: What each is compared with: the same descriptors in the same direction.
BESIDE = {
    name: "NIXL paged, written" if name.endswith(("pushed", "written")) else "NIXL paged, read" for name in CONTENDERS
}


@dataclass(slots=True)
class Samples:
    seconds: list[float] = field(default_factory=list[float])
    prepared: list[float] = field(default_factory=list[float])
    routes: set[str] = field(default_factory=set[str])

    def whole(self) -> list[float]:
        """Seconds with preparation."""
        return [took + prepared for took, prepared in zip(self.seconds, self.prepared, strict=True)]


def measure(case: Case, rounds: int, device: str) -> dict[str, Samples]:
    """In turns; the first round warms up and is verified, the last is verified again."""
    found = {name: Samples() for name in CONTENDERS}
    with paired(case, device) as pair:
        for number in range(rounds + 1):
            for name, samples in found.items():
                contender = CONTENDERS[name](pair)
                if number in (0, rounds):
                    pair.poison()
                prepared = contender.prepare()
                contender.post()
                took = contender.wait()
                if number in (0, rounds):
                    contender.verify()
                contender.close()
                samples.routes.add(getattr(contender, "routes", ""))
                if number:
                    samples.seconds.append(took)
                    samples.prepared.append(prepared)
    return found


def rows_of(name: str, case: Case, found: dict[str, Samples]) -> Iterator[dict[str, object]]:
    spreads = {who: Spread.of(samples.seconds) for who, samples in found.items()}
    for who, spread in spreads.items():
        beside = found[BESIDE[who]]
        ratios = [paged / own for own, paged in zip(found[who].seconds, beside.seconds, strict=True)]
        whole = [paged / own for own, paged in zip(found[who].whole(), beside.whole(), strict=True)]
        row: dict[str, object] = {
            "case": name,
            "descriptors": 1 if who == "bulk" else case.planes * case.pages,
            "descriptor_bytes": case.nbytes if who == "bulk" else case.run_bytes,
            "contender": who,
            "routes": "+".join(sorted(found[who].routes)),
            "gb_per_s": round(case.nbytes / spread.median / 1e9, 3),
            "p10_gb_per_s": round(case.nbytes / spread.high / 1e9, 3),
            "p90_gb_per_s": round(case.nbytes / spread.low / 1e9, 3),
            "of_paged": round(float(np.median(ratios)), 3),
            "of_paged_prepared": round(float(np.median(whole)), 3),
            "of_bulk": round(spreads["bulk"].median / spread.median, 3),
            "prepare_ms": round(Spread.of(found[who].prepared).median * 1e3, 2),
        }
        print(
            f"{name}  {who:<24} {row['gb_per_s']:>6} GB/s ({row['p10_gb_per_s']} to {row['p90_gb_per_s']}),"
            f" {row['of_paged']} of NIXL paged ({row['of_paged_prepared']} with preparation), {row['of_bulk']} of bulk"
            f"  {row['routes']}"
        )
        yield row


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("cases", nargs="*", default=list(CASES), help=" ".join(CASES))
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--device", default="cpu")
    options.add_argument("--out", type=Path, default=RESULTS)
    chosen = options.parse_args()
    rows: list[dict[str, object]] = []
    for name in chosen.cases:
        rows += rows_of(name, CASES[name], measure(CASES[name], chosen.rounds, chosen.device))
    if list(chosen.cases) == list(CASES):
        print(f"wrote {write('collectivex', rows, chosen.out)}")


if __name__ == "__main__":
    main()
