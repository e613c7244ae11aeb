"""How long a running request pauses when it moves: as it runs, against stopped and copied whole.

Two processes of one host over NIXL, 64 KiB a token, NHD to HND. A sleep stands for the computation of each token, as a
GPU's would: it takes none of the cores that copy. The pause is from the last token computed at the source to the moment
at which the target may compute the next one, on the host's one clock; both sides poll as a Progress does. Of each
request the last page's rows are compared.

`python -m perf.bench_migrate` takes about three minutes and writes `results/migrate.csv`.
"""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median, quantiles

import numpy as np
import torch

from kvmover.migrate import ArrivalPhase, ArrivingRank, Checkpoint, DepartingRank, Migration, Party
from kvmover.plan import HOST, Route
from kvmover.transfer.config import MoverConfig
from perf.command_line import options
from perf.record import write
from perf.transfer_pair import ARENA_BYTES, COMPONENT, LAYERS, PAGE_TOKENS, PAGES, PAUSE_S, TOKENS, Side, build

#: What is there when the request begins to move, and how long a token takes.
BEGUN_TOKENS, STEP_S = 3584, 0.02
MIGRATED, WHOLE_EVERY = 100, 5
CONFIG = MoverConfig(arena_bytes=ARENA_BYTES, route=Route.PACKED, costs=replace(HOST, chunk_bytes=8 << 20))
SOURCE, TARGET = Party("prefill", 1), Party("decode", 1)
TABLE = np.random.default_rng(0).permutation(PAGES)


def rows(side: Side, table: Sequence[int] | np.ndarray, tokens: range) -> torch.Tensor:
    """Of the first layer and the last, [plane, token, head, dim] as bytes."""
    pool, _ = side.keep  # pyright: ignore[reportGeneralTypeIssues]
    where = torch.arange(tokens.start, tokens.stop)
    pages = torch.as_tensor(np.asarray(table))[where // PAGE_TOKENS]
    planes = [pool.plane(layer, kv)[pages, where % PAGE_TOKENS] for layer in (0, LAYERS - 1) for kv in (0, 1)]
    return torch.stack(planes).contiguous().view(torch.uint8)


def checksum(side: Side, table: np.ndarray, tokens: int) -> int:
    return zlib.crc32(rows(side, table, range(tokens - PAGE_TOKENS, tokens)).numpy().tobytes())


def target(pipe: Connection) -> None:
    """Land what it is told of, and answer when it was here and what its last rows are."""
    side = build("decode", "HND", "cpu")
    side.mover.configure(CONFIG)
    side.mover.connect(pipe.recv())
    pipe.send(None)
    while not pipe.poll(0):
        nap(side)
    for told in iter(pipe.recv, None):
        pages = np.arange(PAGES)
        if isinstance(told, str):
            transfer = side.mover.receive(told, "prefill", range(BEGUN_TOKENS), [pages])
            side.mover.wait([transfer])
            transfer.landed()
            pipe.send((time.monotonic(), checksum(side, pages, BEGUN_TOKENS)))
            continue
        arriving = ArrivingRank(side.mover, told, [pages])
        arriving.allocated(TOKENS, [pages])
        here = 0.0
        while not arriving.settled:
            nap(side)
            if arriving.poll() is ArrivalPhase.HERE and not here:
                here = time.monotonic()
        assert here, arriving.reason
        pipe.send((here, checksum(side, pages, arriving.landed_tokens)))
    side.mover.close()


def nap(side: Side) -> None:
    if not side.mover.poll():
        time.sleep(PAUSE_S)


class Running:
    """The source is this process, whose request computes a token a step."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs,), daemon=True)
        self._process.start()
        self.side = build("prefill", "NHD", "cpu")
        self.side.mover.configure(CONFIG)
        self._pipe.send(self.side.mover.card)
        self._pipe.recv()
        while not self.side.mover.ranks("decode"):
            nap(self.side)
        self._moves = 0

    def migrated(self) -> tuple[float, int]:
        """Seconds of the pause, and how many tokens were computed while it was copied."""
        self._moves += 1
        tokens, stopped = BEGUN_TOKENS, 0.0
        migration = Migration("r", self._moves, SOURCE, TARGET, tokens)
        departing = DepartingRank(self.side.mover, migration, Checkpoint(tokens, [TABLE]))
        self._pipe.send(migration)
        while not departing.settled:
            if not departing.may_write:
                nap(self.side)
                departing.poll()
                continue
            until = time.monotonic() + STEP_S
            while time.monotonic() < until:
                nap(self.side)
                departing.poll()
            self._write(tokens)
            tokens += 1
            departing.wrote(Checkpoint(tokens, [TABLE]))
            stopped = time.monotonic()
        here, check = self._pipe.recv()
        assert check == checksum(self.side, TABLE, tokens)
        return here - stopped, tokens - BEGUN_TOKENS

    def whole(self) -> float:
        """Seconds of the pause of a request that stops, and is copied then."""
        self._moves += 1
        stopped, name = time.monotonic(), f"whole {self._moves}"
        self._pipe.send(name)
        offered = self.side.mover.send(name, [TABLE])
        self.side.mover.wait([offered])
        offered.landed()
        here, check = self._pipe.recv()
        assert check == checksum(self.side, TABLE, BEGUN_TOKENS)
        return here - stopped

    def _write(self, token: int) -> None:
        pool, _ = self.side.keep  # pyright: ignore[reportGeneralTypeIssues]
        page = int(TABLE[token // PAGE_TOKENS])
        row = torch.randint(0, 1 << 15, pool.plane(0, 0)[0, 0].shape, dtype=torch.int16)
        for layer in range(LAYERS):
            for kv in (0, 1):
                pool.plane(layer, kv)[page, token % PAGE_TOKENS] = row.view(torch.bfloat16)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self.side.mover.close()


def main() -> None:
    options(__doc__).parse_args()
    running = Running()
    pauses: dict[str, list[float]] = {"copied while it runs": [], "stopped and copied": []}
    computed = list[int]()
    for number in range(MIGRATED + 1):  # in turn, after one of each unmeasured
        pause_s, tokens = running.migrated()
        whole_s = running.whole() if number % WHOLE_EVERY == 0 else None
        if number:
            pauses["copied while it runs"].append(pause_s)
            pauses["stopped and copied"] += [] if whole_s is None else [whole_s]
            computed.append(tokens)
    running.close()
    table = list[dict[str, object]]()
    for name, seconds in pauses.items():
        percentiles = quantiles(seconds, n=100, method="inclusive")
        shown = {"p50": percentiles[49], "p99": percentiles[98]}
        table.append(
            {
                "way": name,
                "tokens": BEGUN_TOKENS,
                "token_bytes": COMPONENT.token_bytes,
                "step_ms": round(STEP_S * 1e3),
                "moves": len(seconds),
                **{f"pause_{which}_ms": round(pause * 1e3, 2) for which, pause in shown.items()},
                **{f"pause_{which}_steps": round(pause / STEP_S, 2) for which, pause in shown.items()},
                "computed_meanwhile": median(computed) if name == "copied while it runs" else 0,
            }
        )
        print(f"{name:24} pause {shown['p50'] * 1e3:8.2f} ms at p50, {shown['p99'] * 1e3:8.2f} ms at p99")
    write("migrate", table)


if __name__ == "__main__":
    main()
