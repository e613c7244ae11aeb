"""The prefix tree beside SGLang's and vLLM's, on a public trace: thread CPU time of match, lock, evict, insert, unlock.

    KVMOVER_TRACES=FOLDER KVMOVER_PEERS=SITE_PACKAGES python -m perf.bench_prefix [trace] [shapes] [policies] [replay]

Every pass over the trace is a process of its own, and the contenders take turns, so that noise falls on all alike.
Whole requests are timed in `ROUNDS` passes; one more pass reads the clock at every operation, which costs 0.3 us each.
Targets: five times the requests per second of SGLang's Rust core at page 64, three times of 64-bit tokens and of lists
where both get them, vLLM's hit rates, 20 us to evict one leaf of 50,000, half of the Rust core's memory a token, 10,000
requests per second replayed on all tiers.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from kvmover.cache.prefix import FULL, POLICIES, PrefixTree, SlidingWindow
from kvmover.cache.prefix.hashes import chain
from kvmover.tools.replay import ReplayConfig, ReplayRequest, Server, read_trace, replay
from perf.command_line import options
from perf.prefix_ours import (
    UNLIMITED,
    Contender,
    Kvmover,
    KvmoverEvents,
    KvmoverInt64,
    KvmoverList,
    KvmoverPython,
    Maker,
    without_c,
)
from perf.prefix_peers import load
from perf.record import Spread, replace, write

ROUNDS = 3
RUST = "sglang rust core"
OURS: dict[str, Maker] = {
    "kvmover": Kvmover,
    "kvmover int64": KvmoverInt64,
    "kvmover list": KvmoverList,
    "kvmover in python": KvmoverPython,
    "kvmover events": KvmoverEvents,
}
CAPACITIES = {"unlimited": UNLIMITED, "10M": 10_000_000, "3M": 3_000_000}
#: vLLM keeps an object and a hash a page: with pages of one token a pass takes minutes.
SLOW_AT_PAGE_1 = {"vllm"}
#: These are told once: at page 64.
ONLY_AT_PAGE_64 = {
    "kvmover int64",
    "kvmover list",
    "kvmover in python",
    "kvmover events",
    "kvmover in sglang",
    "kvmover in sglang gathering",
    "kvmover in sglang events",
    "kvmover in sglang windows",
    "sglang rust core windows",
    "sglang rust core list",
    "sglang rust core events",
    "sglang rust gathering",
}
#: The Rust core under the same terms, where that isn't the row `RUST`: of lists, with indices gathered, with KV events.
ALIKE = {
    "kvmover list": "sglang rust core list",
    "kvmover events": "sglang rust core events",
    "kvmover in sglang gathering": "sglang rust gathering",
    "kvmover in sglang events": "sglang rust core events",
    "kvmover in sglang windows": "sglang rust core windows",
}
#: Tokens of device, host and storage.
REPLAYED = ((3_000_000, 0, 0), (3_000_000, 10_000_000, 0), (3_000_000, 10_000_000, 40_000_000))

#: What may be measured.
PARTS = ("trace", "shapes", "policies", "replay")


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the trace by one contender."""

    request_us: Spread
    cpu_s: float
    hit_rate: float
    bytes_a_token: float
    operations_s: dict[str, float]


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all")
    asked.add_argument("--page", type=int, action="append", help="tokens a page of the trace's passes; 64, 16 and 1")
    asked.add_argument("--capacity", choices=CAPACITIES, action="append", help="of the trace's passes; all")
    asked.add_argument("--first", type=int, help="so many requests of the trace; all")
    given = asked.parse_args()
    parts: list[str] = given.parts or [*PARTS]
    if unknown := set(parts) - {*PARTS}:
        asked.error(f"{', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    path = Path(os.environ.get("KVMOVER_TRACES", "traces")) / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        sys.exit(f"there is no {path}: KVMOVER_TRACES names the folder of the trace")
    requests = list(read_trace(path))[: given.first]
    makers = OURS | load()
    if "trace" in parts:
        rows = list(_trace(requests, makers, given.page or (64, 16, 1), given.capacity or [*CAPACITIES]))
        print("wrote", replace("prefix_trace", rows, ("contender", "page_tokens", "capacity")))
    if "shapes" in parts:
        rows = [*_depths(makers), *_evictions(makers), *_pieces(), *_steps()]
        print("wrote", write("prefix_shapes", rows))
    if "policies" in parts:
        rows = list(_policies(requests))
        print("wrote", write("prefix_policies", rows))
    if "replay" in parts:
        rows = list(_replays(requests))
        print("wrote", write("prefix_replay", rows))


def _trace(
    requests: list[ReplayRequest], makers: dict[str, Maker], pages: Sequence[int], labels: Sequence[str]
) -> Iterator[dict[str, object]]:
    for page_tokens in pages:
        for label in labels:
            capacity = CAPACITIES[label]
            chosen = {
                name: maker
                for name, maker in makers.items()
                if not (page_tokens == 1 and name in SLOW_AT_PAGE_1)
                and not (page_tokens != 64 and name in ONLY_AT_PAGE_64)
            }
            passes: dict[str, list[Pass]] = {name: [] for name in chosen}
            rounds = ROUNDS if page_tokens == 64 else 1
            for number in range(rounds + 1):
                for name, maker in chosen.items():
                    if name == "vllm" and number not in (0, rounds):
                        continue  # ten times as long as the others
                    passes[name].append(apart(_serve, maker, requests, page_tokens, capacity, number == rounds))
            whole = {name: Spread.of([each.cpu_s for each in got[:-1]]) for name, got in passes.items()}
            for name, got in passes.items():
                yield _row(name, page_tokens, label, whole, got, len(requests))


def _row(
    name: str, page_tokens: int, label: str, whole: dict[str, Spread], passes: list[Pass], requests: int
) -> dict[str, object]:
    spread, split = whole[name], passes[-1]
    against, alike = (
        whole[core].median / spread.median if core in whole else float("nan") for core in (RUST, ALIKE.get(name, RUST))
    )
    row = {
        "contender": name,
        "version": _version(name),
        "page_tokens": page_tokens,
        "capacity": label,
        "requests": requests,
        "requests_per_s": round(requests / spread.median),
        "low": round(requests / spread.high),
        "high": round(requests / spread.low),
        "of_rust_core": round(against, 3),
        "of_rust_core_alike": round(alike, 3),
        "hit_rate": round(split.hit_rate, 5),
        "p50_us": round(passes[0].request_us.median, 1),
        "p90_us": round(passes[0].request_us.high, 1),
        "bytes_a_token": round(passes[0].bytes_a_token, 2) if label == "unlimited" else "",
    }
    for operation in ("hash", "match", "lock", "evict", "alloc", "insert", "unlock", "events", "ledger"):
        row[f"{operation}_us"] = round(split.operations_s.get(operation, 0.0) / requests * 1e6, 2)
    print(
        f"page {page_tokens:>2} {label:>9} {name:<20} {row['requests_per_s']:>7,} requests/s,"
        f" {against:>5.2f} of the Rust core, {alike:>5.2f} of it alike, hit rate {row['hit_rate']:.5f}, "
        + " ".join(f"{key[:-3]} {row[key]}" for key in row if str(key).endswith("_us") and row[key]),
        flush=True,
    )
    return row


def _serve(maker: Maker, requests: list[ReplayRequest], page_tokens: int, capacity: int, split: bool) -> Pass:
    contender, clock = maker(page_tokens, capacity), time.thread_time_ns
    operations: Counter[str] = Counter()
    last = 0

    def lap(operation: str) -> None:
        nonlocal last
        now = clock()
        if operation != "start":
            operations[operation] += now - last
        last = now

    def nothing(_: str) -> None:
        return None

    marks = lap if split else nothing
    hits, samples = 0, list[int]()
    gc.collect()
    gc.freeze()
    before = _resident_bytes()
    for request in requests:
        prompt = contender.prepare(request.tokens())
        began = clock()
        hits += contender.serve(prompt, marks)
        samples.append(clock() - began)
    prompts = sum(request.input_length for request in requests)
    grown = _resident_bytes() - before
    return Pass(
        Spread.of([sample / 1e3 for sample in samples]),
        sum(samples) / 1e9,
        hits / prompts,
        grown / (prompts - hits),
        {name: total / 1e9 for name, total in operations.items()},
    )


def apart(call: Callable[..., Any], *arguments: object) -> Any:
    """The answer of a call in a child of its own: what one pass leaves in memory is no other's to pay for."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        there.send(call(*arguments))

    child = context.Process(target=run)
    child.start()
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        child.join()
        sys.exit(f"{call.__name__}{arguments[2:]} ended with status {child.exitcode}")
    child.join()
    return answer


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _depths(makers: dict[str, Maker]) -> Iterator[dict[str, object]]:
    """A chat of 102,400 tokens that grew in so many turns: its last turns."""
    tokens, page_tokens = np.arange(102_400, dtype=np.int32), 16
    for turns in (50, 200, 800):
        found = {
            name: apart(_deep, maker, tokens, page_tokens, turns)
            for name, maker in makers.items()
            if name not in ONLY_AT_PAGE_64
        }
        yield from _compared("chat of 102,400 tokens", f"{turns} turns", found, ("match", "insert"))


def _deep(maker: Maker, tokens: np.ndarray, page_tokens: int, turns: int) -> dict[str, Spread]:
    contender = maker(page_tokens, UNLIMITED if maker.__name__ != "Vllm" else 1_000_000)
    samples: dict[str, list[float]] = {}
    for turn in range(1, turns + 1):
        prompt = contender.prepare(tokens[: len(tokens) * turn // turns])
        _timed(contender, prompt, samples)
    return {name: Spread.of(times[-max(10, turns // 20) :]) for name, times in samples.items()}


def _evictions(makers: dict[str, Maker]) -> Iterator[dict[str, object]]:
    """One leaf of 64 tokens at a time goes, and another comes, in a full cache of so many."""
    for leaves in (1_000, 10_000, 50_000):
        found = {
            name: apart(_evict_one, maker, leaves) for name, maker in makers.items() if name not in ONLY_AT_PAGE_64
        }
        yield from _compared("evict one leaf of 64 tokens", f"{leaves} leaves", found, ("evict",))


def _evict_one(maker: Maker, leaves: int) -> dict[str, Spread]:
    page_tokens, calls = 16, 200
    contender = maker(page_tokens, leaves * 64)
    samples: dict[str, list[float]] = {}
    for leaf in range(leaves + calls):
        prompt = contender.prepare(np.arange(leaf * 64, leaf * 64 + 64, dtype=np.int32))
        if leaf < leaves:
            contender.serve(prompt, lambda _: None)
        else:
            _timed(contender, prompt, samples)
    return {name: Spread.of(times) for name, times in samples.items()}


def _timed(contender: Contender, prompt: Any, samples: dict[str, list[float]]) -> None:
    last, clock = 0, time.thread_time_ns

    def lap(operation: str) -> None:
        nonlocal last
        now = clock()
        if operation != "start":
            samples.setdefault(operation, []).append((now - last) / 1e3)
        last = clock()

    contender.serve(prompt, lap)


def _compared(
    what: str, size: str, found: dict[str, dict[str, Spread]], operations: tuple[str, ...]
) -> Iterator[dict[str, object]]:
    for operation in operations:
        rust = found.get(RUST, {}).get(operation)
        for name, spreads in found.items():
            spread = spreads.get(operation)
            if spread is None:
                continue
            against = rust.median / spread.median if rust else float("nan")
            print(
                f"{what}, {size}: {operation:<7} {name:<20} {spread.median:>9.1f} us, {against:>6.2f} of the Rust core"
            )
            yield _shape(what, size, operation, name, spread, against)


def _shape(what: str, size: str, operation: str, name: str, spread: Spread, against: float) -> dict[str, object]:
    return {
        "what": what,
        "size": size,
        "operation": operation,
        "contender": name,
        "version": _version(name),
        "median_us": round(spread.median, 2),
        "p10_us": round(spread.low, 2),
        "p90_us": round(spread.high, 2),
        "of_rust_core": round(against, 3),
    }


def _steps() -> Iterator[dict[str, object]]:
    """Leaves of one page that go in steps: all steps, and the longest of them."""
    for window_tokens, leaves in ((0, 500_000), (4, 50_000)):
        size = f"{leaves:,} leaves" + (f", a window of {window_tokens}" if window_tokens else "")
        whole, steps = list[float](), list[float]()
        for _ in range(ROUNDS):
            times = apart(_step_times, window_tokens, leaves)
            whole.append(sum(times))
            steps.append(max(times))
        for operation, samples in (("all steps", whole), ("the longest step", steps)):
            spread = Spread.of(samples)
            print(f"evict {size} in steps: {operation} {spread.median:.0f} us, most {max(samples):.0f}")
            yield _shape("evict leaves of a page in steps", size, operation, "kvmover", spread, float("nan"))


def _step_times(window_tokens: int, leaves: int) -> list[float]:
    clock, times = time.thread_time_ns, list[float]()
    tree = PrefixTree(1, components=[SlidingWindow(window_tokens)] if window_tokens else ())
    for leaf in range(leaves):
        tree.insert([leaf], [leaf], held={"swa": [leaf]} if window_tokens else None)
    gc.collect()
    gc.freeze()
    began = clock()
    for _ in tree.evict_in_steps({FULL: leaves}):
        times.append((clock() - began) / 1e3)
        began = clock()
    return times


def _pieces() -> Iterator[dict[str, object]]:
    """What a request pays for its hashes and its account."""
    tokens = np.arange(131_072, dtype=np.int32)
    for page_tokens in (16, 64, 256):
        spread = _repeated(lambda size=page_tokens: chain(b"", tokens, size), 15, 131_072 // page_tokens)
        print(
            f"hashing, page {page_tokens}: {spread.median:.3f} us a page, {page_tokens / spread.median:.0f} M tokens/s"
        )
        yield _shape("hash a page", f"page {page_tokens}", "hash", "kvmover", spread, float("nan"))
    spread = _repeated(_accounts, 15, 2_000)
    print(f"ledger: {spread.median:.2f} us a request")
    yield _shape("account of a request", "4 events", "ledger", "kvmover", spread, float("nan"))


def _accounts() -> None:
    from kvmover.cache.ledger import Credit, FaultPolicy, Ledger, Loss

    ledger, credit, lost = Ledger(fault=FaultPolicy.COUNT), Credit(640), {Loss.CAPACITY_EVICTED: 64}
    for number in range(2_000):
        ledger.matched(number, 12_000, 704, number * 0.01)
        ledger.admitted(number, credit, lost)
        ledger.computed(number, 11_360)
        ledger.finished(number, number * 0.01)


def _repeated(call: Callable[[], object], rounds: int, things: int) -> Spread:
    """Microseconds of thread CPU time for each of the `things` that one call does, after one call unmeasured."""
    samples = list[float]()
    for number in range(rounds + 1):
        began = time.thread_time_ns()
        call()
        if number:
            samples.append((time.thread_time_ns() - began) / 1e3 / things)
    return Spread.of(samples)


def _policies(requests: list[ReplayRequest]) -> Iterator[dict[str, object]]:
    for capacity in (1_000_000, 3_000_000, 10_000_000):
        for name, policy in POLICIES.items():
            report = replay(requests, ReplayConfig(64, capacity, policy=policy))
            row = {"policy": name, "capacity_tokens": capacity, "hit_rate": round(report.totals.hit_rate, 5)}
            row["ideal_hit_rate"] = round(report.ideal_hit_rate, 5)
            print(f"{capacity:>10,} tokens, {name:<10} {row['hit_rate']:.5f}", flush=True)
            yield row


def _replays(requests: list[ReplayRequest]) -> Iterator[dict[str, object]]:
    """Whole replays with their ledger, the core in C and the Python in turn."""
    for tokens in REPLAYED:
        config = ReplayConfig(64, *tokens)
        seconds: dict[str, list[float]] = {core: [] for core in ("c", "python")}
        for _ in range(ROUNDS):
            for core, passes in seconds.items():
                passes.append(apart(_replay, core, requests, config))
        python = Spread.of(seconds["python"])
        for core, passes in seconds.items():
            spread = Spread.of(passes)
            row = {
                "core": core,
                **dict(zip(("device_tokens", "host_tokens", "storage_tokens"), tokens, strict=True)),
                "requests_per_s": round(len(requests) / spread.median),
                "low": round(len(requests) / spread.high),
                "high": round(len(requests) / spread.low),
                "of_python": round(python.median / spread.median, 3),
            }
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            yield row


def _replay(core: str, requests: list[ReplayRequest], config: ReplayConfig) -> float:
    """Thread CPU seconds."""
    if core == "python":
        without_c()
    server = Server(config)
    gc.collect()
    gc.freeze()
    began = time.thread_time()
    for request in requests:
        server.serve(request)
    return time.thread_time() - began


def _version(name: str) -> str:
    package = name.split()[0]
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
