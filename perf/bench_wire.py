"""Transfers over a wire that costs: two network namespaces, 1 Gb/s, and NIXL over TCP. As root on Linux.

`make wire`, or `python -m perf.bench_wire [--rounds 5] [--out FOLDER]`. On a cable of veth with a token bucket, and on
one of TAP devices that also delays packets by 5 ms a way and loses one in 2,000: 32 MiB of bfloat16 packed, direct,
pulled, converted to fp8 on the way, each with and without digests. In turn with them, in the same two processes, raw
NIXL writes the bytes once, or, as the row beside a pull, reads them. Beside each measured time stands the time that the
cost model predicts from the speeds that the mover has measured. A machine that allows no namespaces is told so, and the
program ends with exit status 0.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from kvmover.layout import Component
from kvmover.layout.codec import named
from kvmover.plan import HOST, Posting, Route
from kvmover.transfer.config import Integrity, MoverConfig
from kvmover.transfer.peers.links import REFIT_S
from kvmover.transfer.protocol.wire import Verb
from perf import record
from perf.command_line import options
from perf.network_cable import Cable, NotAllowed, SlowCable, enter
from perf.transfer_pair import ARENA_BYTES, COMPONENT, LOSSY, Pair

#: 1 Gb/s, and 32 MiB of bfloat16.
BYTES_PER_S, TOKENS = 125e6, 512

FP8 = COMPONENT.kept_as(named("fp8_e4m3", COMPONENT.dtype, [COMPONENT.dim]))
COSTS = replace(HOST, chunk_bytes=2 << 20, posting=Posting.SOCKET)
PACKED = MoverConfig(arena_bytes=ARENA_BYTES, route=Route.PACKED, costs=COSTS, lossy=LOSSY)
DIRECT, PULL = replace(PACKED, route=Route.DIRECT), replace(PACKED, verb=Verb.PULL)


@dataclass(frozen=True, slots=True)
class Case:
    """A way of moving the request. `component`: of the destination."""

    config: MoverConfig
    component: Component = COMPONENT

    @property
    def nbytes(self) -> int:
        """The bytes on the wire."""
        return TOKENS * self.component.token_bytes

    @property
    def raw(self) -> str:
        """Returns the name of raw NIXL's way for these bytes."""
        return next(name for name, way in RAWS.items() if way == (self.component, self.config.verb))


def _cases() -> Iterator[tuple[str, Case]]:
    ways = {
        "packed": PACKED,
        "packed, pulled": PULL,
        "direct": DIRECT,
        "direct, pulled": replace(DIRECT, verb=Verb.PULL),
    }
    for name, config in ways.items():
        yield name, Case(config)
        yield f"{name}, digests", Case(replace(config, integrity=Integrity.DIGEST))
    yield "packed, to fp8", Case(PACKED, FP8)
    yield "packed, to fp8, digests", Case(replace(PACKED, integrity=Integrity.DIGEST), FP8)


CASES: Mapping[str, Case] = dict(_cases())
RAW = "raw NIXL, one write"
READ, RAW_FP8 = "raw NIXL, one read", f"{RAW} of fp8"
RAWS = {RAW: (COMPONENT, Verb.PUSH), READ: (COMPONENT, Verb.PULL), RAW_FP8: (FP8, Verb.PUSH)}


def measured(pipe: Connection, near: str, far: str, rounds: int) -> None:
    """Send (case, wire bytes, seconds) of each sample, then the predicted seconds by case; for the near namespace."""
    enter(near)
    pairs = {component: Pair(component=component, network=far) for component in (COMPONENT, FP8)}
    plain = pairs[COMPONENT]
    for pair in pairs.values():  # the first request meets the peer
        pair.moved(PACKED, TOKENS)
    for number in range(rounds + 1):
        for name, component, verb in (
            (RAW, COMPONENT, Verb.PUSH),
            (READ, COMPONENT, Verb.PULL),
            (RAW_FP8, FP8, Verb.PUSH),
        ):
            nbytes = component.token_bytes * TOKENS
            seconds = plain.contiguous(nbytes, verb)
            if number:
                pipe.send((name, nbytes, seconds))
        for name, case in CASES.items():
            pair = pairs[case.component]
            seconds = pair.moved(case.config, TOKENS)
            if number:
                pipe.send((name, case.nbytes, seconds))
    time.sleep(REFIT_S)
    pipe.send({name: predicted_s(pairs[case.component], case) for name, case in CASES.items()})
    for pair in pairs.values():
        pair.close()


def predicted_s(pair: Pair, case: Case) -> float:
    """Returns the seconds of a case by the cost model, from the speeds measured by the side that writes or reads."""
    costs = pair.costs(case.config)
    if case.config.route is Route.PACKED:
        return costs.packed_us(case.nbytes, costs.chunks(case.nbytes)) / 1e6
    return costs.direct_us(case.nbytes, case.nbytes // COMPONENT.row_bytes) / 1e6


def over(cable: Cable, rounds: int) -> dict[str, tuple[int, record.Spread, float | None]]:
    """Returns (wire bytes, seconds, predicted seconds) of each case over a cable, which is laid and removed."""
    cable.lay()
    try:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=measured, args=(theirs, cable.near, cable.far, rounds))
        process.start()
        theirs.close()
        samples = dict[str, list[float]]()
        sizes = dict[str, int]()
        while isinstance(said := pipe.recv(), tuple):
            name, nbytes, seconds = said
            samples.setdefault(name, []).append(seconds)
            sizes[name] = nbytes
        process.join()
    finally:
        cable.remove()
    return {name: (sizes[name], record.Spread.of(times), said.get(name)) for name, times in samples.items()}


CABLES: Mapping[str, Cable] = {
    "1 Gb/s": Cable(bytes_per_s=BYTES_PER_S),
    "1 Gb/s, 5 ms, 0.05 % lost": SlowCable(delay_s=0.005, loss=0.0005, bytes_per_s=BYTES_PER_S),
}


def rows(rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for each case on each cable."""
    for cable_name, cable in CABLES.items():
        found = over(cable, rounds)
        for name, (nbytes, spread, predicted) in found.items():
            raw = found[CASES[name].raw if name in CASES else name][1]
            yield {
                "cable": cable_name,
                "way": name,
                "mib": nbytes / 2**20,
                "ms": f"{spread.median * 1e3:.1f}",
                "spread_ms": f"{spread.low * 1e3:.1f} to {spread.high * 1e3:.1f}",
                "of_raw": f"{raw.median / spread.median:.2f}",
                "predicted_ms": "" if predicted is None else f"{predicted * 1e3:.1f}",
                "predicted_by_measured": "" if predicted is None else f"{predicted / spread.median:.2f}",
            }


def main() -> None:
    """Measure, print, and write wire.csv."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    chosen = parser.parse_args()
    os.environ["UCX_TLS"] = "tcp"
    found = list[dict[str, object]]()
    try:
        for row in rows(chosen.rounds):
            found.append(row)
            spread = f"{row['ms']} ms ({row['spread_ms']})"
            predicted = f"predicted {row['predicted_ms']}" if row["predicted_ms"] else ""
            print(f"{row['cable']:26s} {row['way']:26s} {spread:32s} {row['of_raw']} of raw  {predicted}", flush=True)
    except NotAllowed as error:
        print(f"skipped: this machine allows no network namespaces: {error}", file=sys.stderr)
        return
    print(record.write("wire", found, chosen.out))


if __name__ == "__main__":
    main()
