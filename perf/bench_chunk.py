"""The work of the host for a packed chunk before its bytes move: boxes, regions, checks, table; on a GPU the launch.

`python -m perf.bench_chunk [--device cuda] [--out FOLDER] [--rounds N]`. A wire of 50 GB/s carries the 8 MiB in 168 us.
`of its request's tables` is how a mover copies all chunks of a kind but the first: a part of a table that is on the
device. `as bound once` is the first of a kind, and a chunk of several pieces: pools and arenas are known, page tables
were checked with the request, the kernel is the peer's, and a table is made and uploaded. `as if new` works all of it
out for every chunk. Without a GPU tables are made, and neither uploaded nor launched. The post is the transport's, and
part of `bench_request`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvmover.kernels import rows
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.launch import Program
from kvmover.kernels.region import Region
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.legs import Replicas
from kvmover.regions import BoundMemory, bound
from kvmover.transfer.memory.chunk_tables import ChunkCopy, ChunkTables
from kvmover.transfer.memory.programs import OwnMemory, Rules, Way, programs_between
from kvmover.transfer.memory.work import Work
from kvmover.transfer.protocol.chunks import Cut, End, Lane, plans_between
from perf.cases import DEEPSEEK, LLAMA
from perf.record import RESULTS, interleaved, write

TOKENS, CHUNK_BYTES, SMS = 1024, 8 << 20, 8


@dataclass(frozen=True, slots=True)
class Case:
    """What rank 0 of one fleet sends to rank 0 of another."""

    name: str
    component: Component
    src: Fleet
    dst: Fleet

    def end(self, fleet: Fleet) -> End:
        shard = self.component, fleet.shard(self.component, 0, TOKENS)
        return End(fleet, 0, (PoolSpec.dense(*shard, 2 * TOKENS // fleet.page_tokens, fleet.page_tokens, "NHD"),))


CASES = (
    Case("Llama-3-70B, TP2 to TP8, page 64", LLAMA, Fleet(tp=2, page_tokens=64), Fleet(tp=8, page_tokens=64)),
    Case("Llama-3-70B, TP2 to TP8, page 16", LLAMA, Fleet(tp=2, page_tokens=16), Fleet(tp=8, page_tokens=16)),
    Case("DeepSeek-V3 MLA, page 64", DEEPSEEK, Fleet(page_tokens=64), Fleet(page_tokens=64)),
    Case("DeepSeek-V3 MLA, page 16 to 64", DEEPSEEK, Fleet(page_tokens=16), Fleet(page_tokens=64)),
)


class Chunks:
    """The source's side of a case: pools, an arena, and the chunks of a request, taken in turn."""

    def __init__(self, case: Case, device: str) -> None:
        src, dst = case.end(case.src), case.end(case.dst)
        plans = plans_between((case.component,), case.src, case.dst, range(TOKENS), Replicas.STRIPE)
        self.lane, self._new_lane = (Lane.between(plans, src, dst, Cut(CHUNK_BYTES)) for _ in range(2))
        self._pool = Pool.zeros(src.pools[0], device)
        self._arena = torch.zeros(max(chunk.span_bytes for chunk in self.lane.chunks), dtype=torch.uint8, device=device)
        pages = np.random.default_rng(0).permutation(2 * TOKENS // case.src.page_tokens)
        self._pages = [pages[: TOKENS // case.src.page_tokens]]
        self.lane.check_pages(self.lane.src, self._pages)
        self._known = self._memory()
        pool, arena = self._known
        rules = Rules(Replicas.STRIPE, SMS, digests=False)
        programs = programs_between(Way.GATHER, src, dst, OwnMemory((pool,), arena, arena), rules)
        assert programs is not None, "the ranks have something for each other"
        self._programs, self._program = programs, programs.move
        self._tables = ChunkTables()
        self._next = 0

    def _memory(self) -> tuple[BoundMemory, BoundMemory]:
        return BoundMemory(self._pool.tensors), BoundMemory((self._arena,))

    def of_tables(self) -> None:
        """Launch the next chunk as a part of its request's tables."""
        number, lane = self._turn(), self.lane
        stretch = lane.stretch(number, self._pages, None)
        assert stretch is not None, "one component is one piece"
        work = partial(self._work, number)
        chunk = ChunkCopy(work, 0, False, self._tables, lambda: stretch, self._programs)
        for launch, shift in self._tables.launches(chunk, stretch, SMS, CopyEngine.AUTO, None):
            if self._arena.device.type != "cpu":
                launch.run(shift)

    def bound_once(self) -> None:
        """Launch the next chunk with a table of its own."""
        self._launch(self._regions(self._turn(), self.lane, *self._known), self._program)

    def as_if_new(self) -> None:
        """Launch the next chunk as if there had been no other."""
        self._launch(self._regions(self._turn(), self._new_lane, *self._memory()), None)

    def _turn(self) -> int:
        self._next = (self._next + 1) % len(self.lane.chunks)
        return self._next

    def _work(self, number: int, staged: int) -> Work:
        pool, arena = self._known
        return Work(self._regions(number, self.lane, pool, arena, staged))

    def _regions(
        self, number: int, lane: Lane, pool: BoundMemory, arena: BoundMemory, staged: int = 0
    ) -> Sequence[Region]:
        window = arena.window(staged, lane.chunks[number].span_bytes)
        return [bound(box, pool, window) for _, box in lane.gather_boxes(number, self._pages)]

    def _launch(self, regions: Sequence[Region], using: Program | None) -> None:
        launch = rows.prepare(regions, sms=SMS, using=using)
        assert launch is not None, "a chunk holds something"
        if self._arena.device.type != "cpu":
            launch.run()


def measured(case: Case, device: str, rounds: int) -> Iterator[dict[str, object]]:
    chunks = Chunks(case, device)
    ways: dict[str, Callable[[], object]] = {
        "of its request's tables": chunks.of_tables,
        "as bound once": chunks.bound_once,
        "as if new": chunks.as_if_new,
    }
    spreads = interleaved(ways, rounds)
    for way, spread in spreads.items():
        yield {
            "case": case.name,
            "way": way,
            "chunk_mib": round(max(chunk.nbytes for chunk in chunks.lane.chunks) / 2**20, 2),
            "launched": device != "cpu",
            "us": round(spread.median * 1e6, 1),
            "p10_us": round(spread.low * 1e6, 1),
            "p90_us": round(spread.high * 1e6, 1),
            "of_new": round(spread.median / spreads["as if new"].median, 3),
        }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--rounds", type=int, default=400)
    chosen = options.parse_args()
    lines: list[dict[str, object]] = []
    for case in CASES:
        for line in measured(case, chosen.device, chosen.rounds):
            lines.append(line)
            print(f"{line['case']:<36} {line['way']:<24} {line['us']:>7} us ({line['p10_us']} to {line['p90_us']})")
    print(f"wrote {write('bench_chunk', lines, chosen.out)}")


if __name__ == "__main__":
    main()
