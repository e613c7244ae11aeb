"""The machine's own ceilings, and every move as a share of them: under a budget of SMs, and beside a matrix product.

`python -m perf.roofline [--out FOLDER]`. First what a clone, a fill and a host copy reach here, then gather and scatter
with 1 to all SMs, and how much slower a bf16 matrix product and a read of weights, as a decode of 32 requests has it,
run while a move repeats on another stream. `lost_ms_per_gb`: time of a product lost to a GB, at the move's rate alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from perf.bench_kernels import launcher
from perf.cases import CASES, Case, Move, build
from perf.gpu_time import interleaved, need_gpu
from perf.measured_code import columns
from perf.record import RESULTS, write

BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, None)
CEILING_BYTES = 2 << 30
MATRIX = 8192

#: One of each kind of row; a budget curve of every case would say the same again.
CHOSEN = tuple(
    case
    for case in CASES
    if case.text()
    in (
        "Llama-3-70B, TP2 to TP8, NHD, page 64, scattered",
        "Llama-3-70B, TP2 to TP8, NHD, page 1, scattered",
        "DeepSeek-V3 MLA, TP1 to TP1, NHD, page 64, scattered",
    )
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS)
    out = options.parse_args().out
    need_gpu("perf.roofline")
    lines = ceilings()
    works = neighbours()
    for case in CHOSEN:
        lines += budgets(case, works)
        torch.cuda.empty_cache()
    print(f"wrote {write('roofline', lines, out)}")


def ceilings() -> list[dict[str, object]]:
    """Payload rates of what the hardware does best."""
    source = torch.randint(0, 127, (CEILING_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    host = torch.zeros(CEILING_BYTES // 4, dtype=torch.uint8).pin_memory()
    part = target[: host.numel()]
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "clone, device to device": (CEILING_BYTES, lambda: target.copy_(source)),
        "fill": (CEILING_BYTES, lambda: target.fill_(1)),
        "host to device": (host.numel(), lambda: part.copy_(host, non_blocking=True)),
        "device to host": (host.numel(), lambda: host.copy_(part, non_blocking=True)),
    }
    spreads = interleaved({name: call for name, (_, call) in cases.items()}, 10)
    return [
        {**_line(name, "", "", cases[name][0], spread.median, {}), **columns(None)} for name, spread in spreads.items()
    ]


def neighbours() -> dict[str, Callable[[], object]]:
    """What an engine computes beside a transfer: bound by arithmetic, and by memory."""

    def product(rows: int, columns: int) -> Callable[[], object]:
        shapes = (rows, MATRIX), (MATRIX, columns)
        a, b = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        c = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.mm(a, b, out=c)

    return {"matrix": product(MATRIX, MATRIX), "decode": product(32, 57344)}


def budgets(case: Case, works: Mapping[str, Callable[[], object]]) -> list[dict[str, object]]:
    move: Move = build(case)
    lines: list[dict[str, object]] = []
    for way, regions in (("gather", move.gather), ("scatter", move.scatter)):
        launches = {str(sms or "all"): launcher(regions, sms) for sms in BUDGETS}
        spreads = interleaved({sms: launch.run for sms, launch in launches.items()}, 8)
        for sms, spread in spreads.items():
            launch = launches[sms]
            beside = {name: slowdown(launch.run, work, spread.median) for name, work in works.items()}
            lines.append({**_line(case.text(), way, sms, move.nbytes, spread.median, beside), **columns(launch)})
    return lines


def slowdown(call: Callable[[], object], work: Callable[[], object], call_seconds: float) -> float:
    """Time of `work` with `call` repeating on another stream, over its time alone."""
    alone = _seconds(work, 12)
    other = torch.cuda.Stream()
    repeats = max(2, int(14 * alone * 1.5 / call_seconds))
    with torch.cuda.stream(other):
        for _ in range(repeats):
            call()
    beside = _seconds(work, 12)
    torch.cuda.synchronize()
    return beside / alone


def _seconds(work: Callable[[], object], count: int) -> float:
    """Median seconds of one call."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks[2:])) / 1e3


def _line(what: str, way: str, sms: str, nbytes: int, seconds: float, beside: Mapping[str, float]) -> dict[str, object]:
    line: dict[str, object] = {
        "what": what,
        "way": way,
        "sms": sms,
        "gb_per_s": round(nbytes / seconds / 1e9, 1),
        **{f"{name}_slowdown": round(beside[name], 3) if beside else "" for name in ("matrix", "decode")},
        "lost_ms_per_gb": round((beside["matrix"] - 1) * seconds / nbytes * 1e12, 3) if beside else "",
    }
    slower = f"{line['matrix_slowdown']} {line['decode_slowdown']} {line['lost_ms_per_gb']}"
    print(f"{what:<60} {way:<8} SMs {sms:<4} {line['gb_per_s']:>8} GB/s  {slower}", flush=True)
    return line


if __name__ == "__main__":
    main()
