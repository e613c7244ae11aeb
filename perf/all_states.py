"""Visit every state of whole movers in small plays, and of larger ones as many as fit the time.

`python -m perf.all_states [SECONDS] [--only TEXT ...]`, part of `make night`: so many seconds for each play, 1,200 by
default, or for those alone whose rows have these texts, as "1 x 2 x 1" and "lose". Two workers. Prints each play, its
states and their depth, keeps its row of all_states.csv, and ends with 1 at a counterexample, which is printed as a
sequence chart.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from kvmover.plan.cost import Route
from kvmover.transfer.protocol.wire import Verb
from perf.command_line import options
from perf.proved_table import OF_A_PLAY
from perf.record import replace
from tests.states.migration_play import MigrationPlay
from tests.states.play import Play
from tests.states.search import Begin, Counterexample, search, stuck
from tests.states.sequence_chart import charted
from tests.states.stages import (
    LOST_AND_REPEATED,
    WAITED_FOR,
    growing,
    one_to_one,
    one_to_two,
)

WORKERS = 2
#: Single faults whose states are soon visited.
QUICK_FAULTS = ("abort", "stop", "crash", "kill", "late", "gather")
#: Faults of a migration between two engines of one rank.
MIGRATIONS = ((), (("lose", 1),), (("abort", 1),))


@dataclass(frozen=True, slots=True)
class Searched:
    """A play to search. `faults`: how many of each kind may come."""

    stage: str
    verb: Verb
    route: Route
    faults: tuple[tuple[str, int], ...]
    begin: Begin

    def row(self) -> dict[str, str]:
        """Returns the columns that name it."""
        faults = " ".join(f"{kind}:{most}" for kind, most in self.faults)
        return {"stage": self.stage, "verb": self.verb.value, "route": self.route.value, "faults": faults}


def plays() -> list[Searched]:
    """Returns all plays, shorter ones first."""
    stages = [
        *one_to_one(),
        *one_to_one(*LOST_AND_REPEATED),
        *(stage for fault in QUICK_FAULTS for stage in one_to_one((fault, 1))),
        *one_to_one(("overtake", 1), ("abort", 1)),
        *growing(),
        *one_to_two(),
        WAITED_FOR,
        *one_to_two(*LOST_AND_REPEATED),
        *one_to_one(("delay", 1)),
        *one_to_one(("late", 1), ("abort", 1)),
        *growing(*LOST_AND_REPEATED),
    ]
    migrations = [
        Searched("migration", Verb.PUSH, Route.PACKED, faults, partial(MigrationPlay, faults)) for faults in MIGRATIONS
    ]
    return [
        Searched(each.name, each.verb, each.route, each.faults, partial(Play, each)) for each in stages
    ] + migrations


def row(play: Searched, seconds: float) -> tuple[dict[str, object], str]:
    """Returns the row of a play, and the chart of its counterexample or an empty text."""
    logging.disable(logging.CRITICAL)
    chart = ""
    try:
        found = search(play.begin, seconds)
    except Counterexample as broken:
        chart, found = charted(play.stage, play.begin, broken), broken.found
    return {
        **play.row(),
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
    """Search, print a line for each play, and keep its row."""
    parser = options(__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=1200.0)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT")
    asked, wrong = parser.parse_args(), False
    chosen = [play for play in plays() if all(text in " ".join(play.row().values()) for text in asked.only)]
    with get_context("spawn").Pool(WORKERS) as pool:
        for found, chart in pool.imap_unordered(partial(row, seconds=asked.seconds), chosen):
            print(*found.values(), chart and f"\n{chart}", flush=True)
            replace("all_states", [found], OF_A_PLAY)
            wrong |= bool(found["broken"] or found["stuck"])
    sys.exit(wrong)


if __name__ == "__main__":
    main()
