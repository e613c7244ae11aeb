"""Transfers between two processes of one host, and bytes a rank: what the mover makes of the wire under it.

64 and 256 MiB: packed, pulled, checked, direct and mapped against one contiguous NIXL write of the bytes. All copies
run on the same two cores, on pools in shared memory. Packed copies the bytes three times, two of them on the source's
core: with a gather at 12 GB/s and a write at 8 that leaves 0.6 of the write, less what each chunk takes beside its
bytes. Mapped copies them once, row by row, on one core. Rows are 512 B, NHD to HND, so going direct is one descriptor
for each.

Small requests: 16 tokens, from asking to landed, against a note there and back. Striping: bytes that each of eight
ranks with the same latent sends. `python -m perf.bench_transfer [throughput] [latency] [striping]`, all by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import HOST, Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.config import Integrity, MoverConfig
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport
from perf.record import RESULTS, Spread, write
from perf.transfer_pair import ARENA_BYTES, COMPONENT, TOKENS, Pair

ROUNDS = 15
SMALL_TOKENS, SMALL_ROUNDS = 16, 300
MLA = Component.mla(61, 576, "bfloat16")
MLA_TOKENS, MLA_PAGE_TOKENS = 1024, 64

PACKED = MoverConfig(arena_bytes=ARENA_BYTES, route=Route.PACKED, costs=replace(HOST, chunk_bytes=8 << 20))


def chunks(mib: int, **how: object) -> MoverConfig:
    return replace(PACKED, costs=replace(HOST, chunk_bytes=mib << 20), **how)


@dataclass(frozen=True, slots=True)
class Case:
    """`tokens` of 64 KiB each. `every`: a case of seconds runs in every so manieth round only."""

    config: MoverConfig
    tokens: int = 1024
    every: int = 1


CASES = {
    "packed, 16 MiB chunks": Case(chunks(16)),
    "packed, 8 MiB chunks": Case(chunks(8)),
    "packed, 2 MiB chunks": Case(chunks(2)),
    "pulled, 16 MiB chunks": Case(chunks(16, verb=Verb.PULL)),
    "packed, 16 MiB chunks, digests": Case(chunks(16, integrity=Integrity.DIGEST), every=3),
    "direct": Case(chunks(16, route=Route.DIRECT), every=3),
    "direct, pulled": Case(chunks(16, route=Route.DIRECT, verb=Verb.PULL), every=3),
    "mapped": Case(chunks(16, route=Route.MAPPED)),
    "mapped, pulled": Case(chunks(16, route=Route.MAPPED, verb=Verb.PULL)),
    "packed, 16 MiB chunks, more of them": Case(chunks(16), 4096),
    "pulled, 16 MiB chunks, more of them": Case(chunks(16, verb=Verb.PULL), 4096),
    "mapped, more of them": Case(chunks(16, route=Route.MAPPED), 4096),
    "mapped, pulled, more of them": Case(chunks(16, route=Route.MAPPED, verb=Verb.PULL), 4096),
}
SMALL = {
    "packed": PACKED,
    "packed, pulled": replace(PACKED, verb=Verb.PULL),
    "packed, digests": replace(PACKED, integrity=Integrity.DIGEST),
    "direct": replace(PACKED, route=Route.DIRECT),
    "mapped": replace(PACKED, route=Route.MAPPED),
    "direct, pulled": replace(PACKED, route=Route.DIRECT, verb=Verb.PULL),
}


def throughput(pair: Pair, out: Path) -> None:
    """In turns, contiguous writes of as many bytes too. Each twice, the second is timed: as one of many alike is."""
    samples: dict[str, list[float]] = {name: [] for name in CASES}
    plain: dict[int, list[float]] = {case.tokens: [] for case in CASES.values()}
    for number in range(ROUNDS):
        for tokens, times in plain.items():
            times.append([pair.contiguous(tokens * COMPONENT.token_bytes) for _ in range(2)][1])
        for name, case in CASES.items():
            if number % case.every == 0:
                samples[name].append([pair.moved(case.config, case.tokens) for _ in range(2)][1])
    report({name: Spread.of(times) for name, times in samples.items()}, {n: Spread.of(plain[n]) for n in plain}, out)


def report(spreads: Mapping[str, Spread], plain: Mapping[int, Spread], out: Path) -> None:
    every = [("one contiguous write", tokens, spread) for tokens, spread in plain.items()]
    every += [(name, CASES[name].tokens, spread) for name, spread in spreads.items()]
    rows: list[dict[str, object]] = []
    for name, tokens, spread in sorted(every, key=lambda entry: entry[1]):
        nbytes = tokens * COMPONENT.token_bytes
        packed = "packed, 16 MiB chunks" + (", more of them" if tokens > 1024 else "")
        direct_s = spreads["direct"].median / CASES["direct"].tokens * tokens
        rows.append(
            {
                "what": name,
                "mib": nbytes >> 20,
                "row_bytes": COMPONENT.row_bytes,
                "gb_per_s": round(nbytes / spread.median / 1e9, 3),
                "p10_gb_per_s": round(nbytes / spread.high / 1e9, 3),
                "p90_gb_per_s": round(nbytes / spread.low / 1e9, 3),
                "of_contiguous": round(plain[tokens].median / spread.median, 3),
                "of_direct": round(direct_s / spread.median, 2),
                "of_packed": round(spreads[packed].median / spread.median, 2),
            }
        )
        row = rows[-1]
        print(
            f"{row['mib']:>3} MiB, {name:<30} {row['gb_per_s']:>7} GB/s ({row['p10_gb_per_s']} to"
            f" {row['p90_gb_per_s']}), {row['of_contiguous']} of contiguous, {row['of_direct']} x direct,"
            f" {row['of_packed']} x packed"
        )
    print(f"wrote {write('transfer', rows, out)}")


def latency(pair: Pair, out: Path) -> None:
    """Small requests, in turns, so that noise falls on all alike."""
    samples: dict[str, list[float]] = {"a note there and back": [], **{name: [] for name in SMALL}}
    for _ in range(SMALL_ROUNDS // 10):
        samples["a note there and back"] += pair.round_trips(10)
        for name, config in SMALL.items():
            samples[name] += [pair.moved(config, SMALL_TOKENS) for _ in range(10)]
    rows: list[dict[str, object]] = []
    note = np.median(samples["a note there and back"])
    for name, times in samples.items():
        p50, p90, p99 = np.quantile(times, [0.5, 0.9, 0.99])
        rows.append(
            {
                "what": name,
                "tokens": 0 if "note" in name else SMALL_TOKENS,
                "kib": 0 if "note" in name else SMALL_TOKENS * COMPONENT.token_bytes >> 10,
                "p50_us": round(p50 * 1e6),
                "p90_us": round(p90 * 1e6),
                "p99_us": round(p99 * 1e6),
                "of_a_note": round(p50 / note, 2),
            }
        )
        print(f"{name:<24} p50 {p50 * 1e6:8.0f} us, p99 {p99 * 1e6:8.0f} us, {p50 / note:.1f} notes there and back")
    print(f"wrote {write('transfer_latency', rows, out)}")


def striping(out: Path) -> None:
    """Nothing is timed: one process, no wire. Peers elect: one rank sends everything."""
    rows: list[dict[str, object]] = []
    for policy in Replicas:
        sent = sent_bytes(policy)
        whole = MLA_TOKENS * MLA.token_bytes
        rows.append(
            {
                "what": f"MLA, TP8 to TP1, {policy.value}",
                "mib": round(whole / 2**20, 1),
                "most_mib_a_rank": round(max(sent) / 2**20, 2),
                "least_mib_a_rank": round(min(sent) / 2**20, 2),
                "largest_share": round(max(sent) / sum(sent), 4),
                "ranks_that_send": sum(map(bool, sent)),
            }
        )
        print(f"{rows[-1]['what']}: {[round(n / 2**20, 2) for n in sent]} MiB a rank")
    print(f"wrote {write('transfer_striping', rows, out)}")


def sent_bytes(policy: Replicas) -> list[int]:
    """Bytes that each of eight source ranks sent of one request."""
    network = LoopbackNetwork()
    pages = MLA_TOKENS // MLA_PAGE_TOKENS
    config = MoverConfig(arena_bytes=16 << 20, route=Route.PACKED, replicas=policy, sandbox_bytes=0)
    config = replace(config, costs=replace(HOST, chunk_bytes=4 << 20))

    def mover(engine: str, fleet: Fleet, rank: int) -> Mover:
        spec = PoolSpec.dense(MLA, fleet.shard(MLA, rank, 1), pages, MLA_PAGE_TOKENS, "NHD")
        transport = LoopbackTransport(network, f"{engine}-{rank}")
        return Mover(transport, Model("bench", (MLA,)), Place(engine, fleet, rank), [Pool.zeros(spec)], config)

    fleet = Fleet(tp=8, page_tokens=MLA_PAGE_TOKENS)
    sources = [mover("prefill", fleet, rank) for rank in range(8)]
    target = mover("decode", Fleet(page_tokens=MLA_PAGE_TOKENS), 0)
    for source in sources:
        target.connect(source.card)
        source.poll()
    tables = [np.arange(pages)]
    begun = [source.send("request", tables) for source in sources]
    begun.append(target.receive("request", "prefill", range(MLA_TOKENS), tables))
    while not all(transfer.ended for transfer in begun):
        for one in (*sources, target):
            one.poll()
    assert all(transfer.landed() for transfer in begun)
    sent = [source.meter.counts[Count.SENT_BYTES] for source in sources]
    for one in (*sources, target):
        one.close()
    return sent


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("parts", nargs="*", default=["striping", "latency", "throughput"])
    options.add_argument("--device", default="cpu")
    options.add_argument("--out", type=Path, default=RESULTS)
    chosen = options.parse_args()
    if "striping" in chosen.parts:
        striping(chosen.out)
    if {"latency", "throughput"} & set(chosen.parts):
        pair = Pair(chosen.device)
        pair.moved(SMALL["packed"], TOKENS)  # the first request meets the peer
        for name, measure in {"latency": latency, "throughput": throughput}.items():
            if name in chosen.parts:
                measure(pair, chosen.out)
        pair.close()


if __name__ == "__main__":
    main()
