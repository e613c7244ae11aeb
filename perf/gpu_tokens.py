"""Whole transfers between processes on one GPU: the tokens of a model over moved KV beside those of one process.

`python -m perf.gpu_tokens [SCENARIO ...] [--device DEVICE] [--out FOLDER]` plays scenarios of `kvmover demo` with their
pools on the GPU, mapped by CUDA IPC from process to process, and writes a row for each request into tokens.csv: its
route, and how many of its tokens and bytes are right. `smollm2` is a trained model; without its weights it is left out,
with the reason. Ends with 1 where a token differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvmover.plan import Route
from kvmover.tools.demo import smollm2
from kvmover.tools.demo.demo_report import RunReport
from kvmover.tools.demo.run import MOVER, DemoOptions
from kvmover.tools.demo.run import run as play
from perf.command_line import options
from perf.gpu_time import need_gpu
from perf.record import RESULTS, write

#: Fleets of unlike tensor parallel size, page size and axis order, replicas, a latent, and an answer that migrates.
SCENARIOS = ("gqa", "replicated-dst", "uneven", "latent", "migrate")


def rows_of(report: RunReport) -> Iterator[dict[str, object]]:
    """Yield a row for each request of a run."""
    for scenario in report.scenarios:
        for request in scenario.requests:
            same = sum(own == other for own, other in zip(request.answer, request.expected, strict=True))
            yield {
                "scenario": scenario.name,
                "request": request.name,
                "text": request.text,
                "tokens": len(request.answer),
                "same": same,
                "bytes_identical": request.bytes_identical,
                "bytes": request.wire.nbytes,
                "routes": "+".join(request.wire.routes),
                "ms": round(request.wire.seconds * 1e3, 3),
            }


def main() -> None:
    words = options(__doc__)
    words.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO")
    words.add_argument("--device", default="cuda")
    words.add_argument("--requests", type=int, help="of each scenario")
    words.add_argument("--out", type=Path, default=RESULTS)
    chosen = words.parse_args()
    if chosen.device != "cpu":
        need_gpu("perf.gpu_tokens")
    if "smollm2" in chosen.scenarios and (absent := smollm2.missing()):
        print(f"smollm2: left out, {', '.join(absent)} are not installed: the weights are larger than a part may carry")
        chosen.scenarios.remove("smollm2")
        if not chosen.scenarios:
            return
    settings = replace(DemoOptions().settings, mover=replace(MOVER, route=Route.MAPPED))
    demo = DemoOptions(tuple(chosen.scenarios), chosen.requests, device=chosen.device, settings=settings)
    report = play(demo, lambda work, ended: None, print)
    rows = list(rows_of(report))
    for row in rows:
        print(f"{row['request']:<20} {row['same']} of {row['tokens']} tokens, {row['bytes']} B {row['routes']}")
    print(report.sentence())
    print(f"wrote {write('tokens', rows, chosen.out)}")
    raise SystemExit(0 if report.passed else 1)


if __name__ == "__main__":
    main()
