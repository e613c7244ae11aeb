"""Run one move of the benchmarks a few times and nothing else: what a profiler is pointed at."""

from __future__ import annotations

import argparse

import torch

from kvmover.kernels import rows
from perf.cases import CASES, build
from perf.gpu_time import need_gpu


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", required=True, help="as bench_kernels prints it")
    options.add_argument("--way", choices=("gather", "scatter"), default="gather")
    options.add_argument("--sms", type=int)
    options.add_argument("--runs", type=int, default=5)
    chosen = options.parse_args()
    known = {case.text(): case for case in CASES}
    if chosen.case not in known:
        options.error(f"unknown case {chosen.case!r}; known are: " + "; ".join(known))
    need_gpu("perf.one_move")
    move = build(known[chosen.case])
    regions = move.gather if chosen.way == "gather" else move.scatter
    for _ in range(chosen.runs):
        rows.move(regions, sms=chosen.sms)
    torch.cuda.synchronize()
    print(f"{chosen.runs} runs of {move.nbytes >> 20} MiB")


if __name__ == "__main__":
    main()
