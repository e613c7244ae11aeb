"""Visit every state of whole movers on small stages, and of larger ones as many as fit the time.

`python -m perf.all_states [SECONDS]`, part of `make night`: so many seconds for each stage, 1,200 by default. Two
workers. Prints each stage, its states and their depth, writes all_states.csv, and ends with 1 at a counterexample,
which is printed as a sequence chart.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from multiprocessing import get_context

from perf.command_line import options
from perf.record import write
from tests.states.play import Play
from tests.states.search import Counterexample, search, stuck
from tests.states.sequence_chart import charted
from tests.states.stages import (
    LOST_AND_REPEATED,
    WAITED_FOR,
    Stage,
    growing,
    one_to_one,
    one_to_two,
)

WORKERS = 2
#: Single faults, and the pairs in which one has undone what mends the other.
FAULTS = ("abort", "stop", "crash", "kill", "late", "gather", "delay")
PAIRS = ((("overtake", 1), ("abort", 1)), (("late", 1), ("abort", 1)))


def stages() -> list[Stage]:
    """Returns all stages, those that end soon first."""
    return [
        *one_to_one(),
        *one_to_one(*LOST_AND_REPEATED),
        *(stage for fault in FAULTS for stage in one_to_one((fault, 1))),
        *(stage for pair in PAIRS for stage in one_to_one(*pair)),
        *growing(),
        *one_to_two(),
        WAITED_FOR,
        *one_to_two(*LOST_AND_REPEATED),
        *growing(*LOST_AND_REPEATED),
    ]


def row(stage: Stage, seconds: float) -> tuple[dict[str, object], str]:
    """Returns the row of a stage, and the chart of its counterexample or an empty text."""
    logging.disable(logging.CRITICAL)
    begin, chart = partial(Play, stage), ""
    try:
        found = search(begin, seconds)
    except Counterexample as broken:
        chart, found = charted(str(stage), begin, broken), broken.found
    faults = " ".join(f"{kind}:{most}" for kind, most in stage.faults)
    return {
        "stage": stage.name,
        "verb": stage.verb.value,
        "route": stage.route.value,
        "faults": faults,
        "states": found.states,
        "choices": found.choices,
        "depth": found.depth,
        "whole": found.whole,
        "ends": found.ends,
        "stuck": len(list(stuck(found))) if found.whole else "",
        "broken": chart != "",
        "search_s": f"{found.seconds:.1f}",
    }, chart


def main() -> None:
    """Search, and print a line for each stage."""
    parser = options(__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=1200.0)
    seconds = parser.parse_args().seconds
    rows = list[dict[str, object]]()
    with get_context("spawn").Pool(WORKERS) as pool:
        for found, chart in pool.imap(partial(row, seconds=seconds), stages()):
            rows.append(found)
            print(*found.values(), chart and f"\n{chart}", flush=True)
    print(f"wrote {write('all_states', rows)}")
    sys.exit(any(found["broken"] or found["stuck"] for found in rows))


if __name__ == "__main__":
    main()
