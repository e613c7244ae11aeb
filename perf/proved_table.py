"""README's table of what machines have proved or searched whole, from proof.csv, all_states.csv and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from perf.record import RESULTS, read

Row = dict[str, str]
#: A loss and a repetition, as all_states.csv has them.
LOST = "lose:1 repeat:1"
#: The columns that name a play.
OF_A_PLAY = ("stage", "verb", "route", "faults")


def proved() -> str:
    """Returns the table, with a row for each file that is kept."""
    lines = ["| Theorem or property | How it is checked | How many | Seconds | Open |", "|---|---|---|---|---|"]
    for name, rows in TABLE.items():
        if (RESULTS / f"{name}.csv").exists():
            lines += ["| " + " | ".join(cells) + " |" for cells in rows(read(name))]
    return "\n".join([*lines, ""])


def _theorems(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    names = ", ".join(dict.fromkeys(row["theorem"] for row in rows))
    branches = sum(int(row["branches"]) for row in rows)
    unproved = [row["lemma"] for row in rows if row["verdict"] != "proved"]
    yield (
        f"the algebra of plans for all sizes: {names}",
        "`make proof`: z3 runs the functions themselves on numbers without a value",
        f"{len(rows)} lemmas, {branches:,} branches",
        _seconds(rows, "proof_s"),
        ", ".join(unproved) or "runs of several stripes at once, tiles of whole units, a range that is cut and striped",
    )


def _states(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    property_ = (
        "no write reaches pages that are free or another's; both sides end with one reason; nothing stays leased; the"
        " end is reached"
    )
    how = "whole movers, every order of events, by push and pull, direct, packed and mapped"
    plays: list[tuple[str, Callable[[Row], bool]]] = [
        (
            f"{property_}: 1 source, 1 destination, 1 chunk, a loss and a repetition",
            lambda row: (row["stage"], row["faults"]) == ("1 x 1 x 1", LOST),
        ),
        (
            "the same with no fault, or with a user who leaves, a rank that stops or dies, late notes or writes",
            lambda row: row["stage"] == "1 x 1 x 1" and row["faults"] != LOST,
        ),
        (
            "the same of two engines that ask for one chunk, with a loss and a repetition",
            lambda row: "x 2 x" in row["stage"] and row["faults"] == LOST,
        ),
        (
            "the same of two engines with no fault, also beside a rank that holds no chunk",
            lambda row: "x 2 x" in row["stage"] and row["faults"] != LOST,
        ),
        ("the same of page tables that grow at both ends", lambda row: row["stage"] == "growing tables"),
        ("a migrating request is at one engine, whole", lambda row: row["stage"] == "migration"),
    ]
    from perf.all_states import plays as all_plays

    keys = {tuple(row[key] for key in OF_A_PLAY) for row in rows}
    missing = [row for play in all_plays() if tuple((row := play.row())[key] for key in OF_A_PLAY) not in keys]
    searched = ((name, [row for row in rows if belongs(row)], belongs) for name, belongs in plays)
    for name, some, belongs in (each for each in searched if each[1]):
        open_ = [row for row in some if row["whole"] != "True"]
        broken = sum(row["broken"] == "True" or row["stuck"] not in ("", "0") for row in some)
        later = sum(map(belongs, missing))
        left = [f"{len(open_)} of {len(some)} plays, visited to depth {_range(open_)}"] if open_ else []
        left += [f"{later} more not searched yet"] if later else []
        states, deepest = sum(int(row["states"]) for row in some), max(int(row["depth"]) for row in some)
        many = f"{states:,} states of {len(some)} plays, depth to {deepest}" + f", {broken} broken" * bool(broken)
        yield name, how, many, _seconds(some, "search_s"), "; ".join(left) or "nothing"
        how = "likewise"


def _range(rows: list[Row]) -> str:
    depths = sorted(int(row["depth"]) for row in rows)
    return str(depths[0]) if depths[0] == depths[-1] else f"{depths[0]} to {depths[-1]}"


def _ring(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    faults = [row["fault"] for row in rows if row["fault"]]
    yield (
        "the ring of the bulk kernel loses and mixes no byte, and ends",
        "every order of its two warps' steps, which are read from `bulk.cu`",
        f"{sum(int(row['states']) for row in rows):,} states of {sum(int(row['launches']) for row in rows)} launches",
        _seconds(rows, "cpu_s"),
        ", ".join(faults) or "two lanes a warp; not run on a GPU",
    )


def _faults(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    faults, pairs, broken = (sum(int(row[name]) for row in rows) for name in _OF_FAULTS)
    yield (
        "no fault of a disk, and no two on different pages, loses what a flush promised",
        f"{len(rows)} stories of a store, in which each call of the file system fails in 13 ways",
        f"{faults:,} faults, {pairs:,} pairs, {broken} broken",
        _seconds(rows, "cpu_s"),
        "a disk that loses what it has synced",
    )


_OF_FAULTS = ("single_faults", "pairs", "promises_broken")


def _mutants(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    tried, killed, same, left = (sum(int(row[name]) for row in rows) for name in _COUNTS)
    from tests.mutants.guarded_lines import GUARDED

    missing = [part for part in GUARDED if part not in {row["part"] for row in rows}]
    not_tried = f"; not tried whole: {', '.join(missing)}" if missing else ""
    yield (
        "a line that guards memory or an account does not break unseen",
        f"`make mutants`: {', '.join(sorted(row['part'] for row in rows))}",
        f"{killed:,} of {tried:,} mutants die, {same} change nothing",
        _seconds(rows, "test_s"),
        f"{left} live{not_tried}",
    )


_COUNTS = ("tried", "killed", "equivalent", "survived")


def _seconds(rows: Iterable[Row], column: str) -> str:
    return f"{sum(float(row[column]) for row in rows):,.0f}"


#: The rows that each file gives.
TABLE: dict[str, Callable[[list[Row]], Iterator[tuple[str, ...]]]] = {
    "proof": _theorems,
    "all_states": _states,
    "ring": _ring,
    "storage_faults": _faults,
    "mutants": _mutants,
}
