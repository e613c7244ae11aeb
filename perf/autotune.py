"""Sweep tile size and warps of the row mover, with and without an SM budget, and keep the best for this GPU.

`python -m perf.autotune` measures on a GPU and writes `kernels/tuned/<gpu>.json`; it resumes where it was stopped.
Every candidate is compared with the checked default's bytes before it is timed. `--dry-run` compiles the whole sweep
without a GPU and reports registers, access widths and spills, so that no sweep dies on a GPU for a compile error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from kvmover.kernels import rows
from kvmover.kernels.launch import TUNED, RowConfig, device_key
from kvmover.kernels.region import Region

#: Tiles and warps to try without a budget, and where each program has an SM to itself.
FREE = tuple(product((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8)))
ALONE = tuple(product((8192, 16384, 32768, 65536, 131072), (4, 8, 16, 32)))
BUDGETS = (None, 8)
ROUNDS = 7

#: Of a measured table.
COLUMNS = ("block_bytes", "warps", "gb_per_s")


def candidates(sms: int | None) -> Iterator[RowConfig]:
    """One to sixteen 16-byte accesses a thread: less leaves lanes idle, more registers than there are.

    32 warps have 64 registers a thread; at eight accesses they spill.
    """
    for block_bytes, warps in FREE if sms is None else ALONE:
        if 1 <= block_bytes // (warps * 32 * 16) <= (4 if warps == 32 else 16):
            yield RowConfig(block_bytes, warps)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dry-run", action="store_true")
    options.add_argument("--out", type=Path, default=TUNED)
    chosen = options.parse_args()
    if chosen.dry_run:
        from perf.compile_sweep import compile_all

        raise SystemExit(min(1, compile_all([config for sms in BUDGETS for config in candidates(sms)])))
    from perf.gpu_time import need_gpu

    need_gpu("perf.autotune")
    sweep(chosen.out)


def text_of(table: Mapping[str, Any]) -> str:
    """A table as JSON with an entry a line, so that a difference between two can be read."""
    head = json.dumps({key: value for key, value in table.items() if key != "entries"})
    entries = ",\n".join(map(json.dumps, table["entries"]))
    return f'{head[:-1]}, "entries": [\n{entries}\n]}}\n'


def sweep(folder: Path) -> None:
    """One table a GPU: for every kind of row, direction and budget all candidates with their rates, best first."""
    import torch

    from perf.bench_kernels import check
    from perf.cases import CASES, build
    from perf.record import machine

    path = folder / f"{device_key(torch.cuda.get_device_name())}.json"
    table = json.loads(path.read_text()) if path.exists() else {"about": machine(), "columns": COLUMNS, "entries": []}
    done = {entry["case"] for entry in table["entries"]}
    for case in track([case for case in CASES if case.text() not in done], "tuning"):
        move = build(case)
        check(move)
        for way, regions in (("gather", move.gather), ("scatter", move.scatter)):
            table["entries"] += [{"case": case.text(), "way": way, "sms": sms, **best(regions, sms)} for sms in BUDGETS]
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(table))
        torch.cuda.empty_cache()
    print(f"wrote {path}")


def best(regions: Sequence[Region], sms: int | None) -> dict[str, object]:
    """The kind of row, the fastest candidate, and the measured table, fastest first."""
    from perf.bench_kernels import launcher
    from perf.gpu_time import interleaved

    calls = {config: launcher(list(regions), sms, config) for config in candidates(sms)}
    same_bytes(regions, list(calls.values()))
    spreads = interleaved(calls, ROUNDS)
    nbytes = sum(region.nbytes for region in regions)
    rates = sorted(((nbytes / spreads[config].median / 1e9, astuple(config)) for config in calls), reverse=True)
    kind = rows.kind_of(regions[0])
    measured = [[*config, round(rate, 1)] for rate, config in rates]
    return {"kind": astuple(kind), "best": rates[0][1], "gb_per_s": round(rates[0][0], 1), "table": measured}


def same_bytes(regions: Sequence[Region], calls: Sequence[Callable[[], object]]) -> None:
    """Raise unless every candidate leaves the bytes that the checked default leaves, in poisoned memory."""
    import torch

    truth: list[torch.Tensor] = []
    for call in (lambda: rows.move(regions), *calls):
        for tensor in regions[0].dst.memory:
            tensor.fill_(0xEE)
        call()
        if not truth:
            truth = [tensor.clone() for tensor in regions[0].dst.memory]
        for tensor, expected in zip(regions[0].dst.memory, truth, strict=True):
            assert torch.equal(tensor, expected), "a candidate moves other bytes than the default"


if __name__ == "__main__":
    main()
