"""What a request costs in CPU beside its bytes, on this tree and on an earlier commit, in turn.

`python -m perf.bench_request [COMMIT]` takes about two minutes and writes `results/request.csv`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from perf.before import ROOT, medians, tree_of
from perf.record import machine, write

#: The last commit at which a request was planned anew for each lane, six times.
BEFORE = "d77baa8"
ROUNDS = 5


def main() -> None:
    before = sys.argv[1] if len(sys.argv) > 1 else BEFORE
    with tree_of(before) as old:
        found = medians(Path(__file__).parent / "request_cost.py", {"before": old, "now": ROOT}, ROUNDS)
    rows = [
        {
            "what": what,
            "before_us": round(found["before"][what]),
            "now_us": round(now),
            "ratio": round(found["before"][what] / now, 2),
            "before": before,
        }
        for what, now in found["now"].items()
    ]
    for row in rows:
        print(f"{row['what']:32} {row['before_us']:>8} us {row['now_us']:>8} us  x{row['ratio']}")
    write("request", [{**row, **machine()} for row in rows])


if __name__ == "__main__":
    main()
