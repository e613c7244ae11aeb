"""Times on a GPU: events around calls that are queued behind work, so that no launch gap is measured.

Where there is no GPU, there is one sentence. `python -m perf.gpu_time` names the GPU, the packages and the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from perf.command_line import options
from perf.record import Spread, machine

ROUNDS = 30

Case = TypeVar("Case", bound=Hashable)


def need_gpu(program: str) -> None:
    """Leave with one sentence where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{program} measures a GPU, and torch sees none here")


def interleaved(cases: Mapping[Case, Callable[[], object]], rounds: int = ROUNDS) -> dict[Case, Spread]:
    """Seconds of every case, one call of each a round: drift of clocks and temperature falls on all alike."""
    for call in cases.values():
        for _ in range(3):
            call()
    marks: dict[Case, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in cases}
    busy = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(rounds):
        busy.zero_()  # the host gets ahead of the device: what follows is queued when its turn comes
        for name, call in cases.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            marks[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: Spread.of([a.elapsed_time(b) / 1e3 for a, b in pairs]) for name, pairs in marks.items()}


def main() -> None:
    options(__doc__).parse_args()
    need_gpu("perf.gpu_check")
    about = machine()
    if about["commit"] == "unknown":
        raise SystemExit("no row is worth anything whose commit is unknown: say it in KVMOVER_COMMIT")
    print(*about.items(), sep="\n")


if __name__ == "__main__":
    main()
