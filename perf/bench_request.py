"""What a request costs in CPU beside its bytes, on this tree and on an earlier commit, in turn.

`python -m perf.bench_request [COMMIT]` takes about two minutes and writes `results/request.csv`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from perf.before import ROOT, samples, tree_of
from perf.command_line import options
from perf.record import write

#: The last commit at which every packed chunk was offered before it was granted.
BEFORE = "158ea8f"
ROUNDS = 5


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("commit", nargs="?", default=BEFORE, help=f"the earlier one; {BEFORE}")
    before: str = asked.parse_args().commit
    with tree_of(before) as old:
        found = samples(Path(__file__).parent / "request_cost.py", {"before": old, "now": ROOT}, ROUNDS)
    rows = [
        {
            "what": what,
            "before_us": round(median(found["before"][what])),
            "now_us": round(median(now)),
            "low_us": round(min(now)),
            "high_us": round(max(now)),
            "ratio": round(median(found["before"][what]) / median(now), 2),
            "before": before,
        }
        for what, now in found["now"].items()
    ]
    for row in rows:
        print(f"{row['what']:32} {row['before_us']:>8} us {row['now_us']:>8} us  x{row['ratio']}")
    write("request", rows)


if __name__ == "__main__":
    main()
