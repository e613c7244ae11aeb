"""The table of requests that got the partner of another one, beside the engines' own connectors, from perf/results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perf.record import RESULTS, passed, read

#: How the scenarios of mistakes begin in live.csv, and how those end in which the same prompts came again.
WRONG_PARTNER = "wrong partner: "
AFTERWARDS = ", then the same prompts alone"

#: What follows the name of a mistake that was made once under each of vLLM's policies for loads that fail.
_POLICY = ", policy "

_COLUMNS = (
    *("mistake", "engine", "requests", "wrong", "right", "refused", "then the same prompts: wrong"),
    *("the operator reads", "the engine's own connector"),
)


def mistakes(rows: Sequence[Mapping[str, str]]) -> dict[str, set[str]]:
    """Returns the names of the different mistakes among rows of live.csv, by engine."""
    found = dict[str, set[str]]()
    for row in rows:
        if row["scenario"].startswith(WRONG_PARTNER) and not row["scenario"].endswith(AFTERWARDS):
            found.setdefault(row["engine"], set()).add(_name(row["scenario"]).partition(_POLICY)[0])
    return found


def wrong_partner(engines: Mapping[str, str]) -> list[str]:
    """Returns the lines of the table: a row for each mistake of the last whole run; none where that has no mistake.

    `engines`: how the page calls them, by their names in the files.
    """
    rows = [row for row in passed("live") if row["scenario"].startswith(WRONG_PARTNER)]
    made = [row for row in rows if not row["scenario"].endswith(AFTERWARDS)]
    if not made:
        return []
    then = {(row["engine"], row["scenario"]): row for row in rows if row["scenario"].endswith(AFTERWARDS)}
    asked = read("live_partners") if (RESULTS / "live_partners.csv").exists() else []
    theirs = {(row["engine"], row["mistake"]): row for row in asked}
    counts = " and ".join(f"{len(names)} in {engines[engine]}" for engine, names in mistakes(made).items())
    requests, wrong = (sum(int(row[name]) for row in rows) for name in ("requests", "wrong"))
    lines = [
        f"**Wrong partner.** Mistakes that give a request the KV of another one, {counts}: {requests:,} requests, with"
        f" the same prompts afterwards; {wrong} with a wrong token.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
    ]
    for row in made:
        name, again = _name(row["scenario"]), then[row["engine"], row["scenario"] + AFTERWARDS]
        peer = theirs.get((row["engine"], name.partition(_POLICY)[0]))
        cells = (
            *(name, engines[row["engine"]], row["requests"], row["wrong"], row["same"], row["failed"]),
            *(f"{again['wrong']} of {again['requests']}", _escaped(row["said"]), _told(peer) if peer else "not run"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _name(scenario: str) -> str:
    return scenario.removeprefix(WRONG_PARTNER)


def _told(row: Mapping[str, str]) -> str:
    """Returns what an engine's own connector answered, in words: `NixlConnector: 4 wrong; then 4 of 4 wrong`."""
    if row["requests"] == "0":
        return f"{row['connector']}: {row['said']}"
    words = {"same": "right", "wrong": "wrong", "refused": "refused", "unanswered": "without an answer"}
    told = [f"{row[name]} {word}" for name, word in words.items() if int(row[name])]
    if int(row["unanswered"]):
        told[-1] += f" within {row['within_s']} s"
    then = [f"{row[name]} of {row['then_requests']} {word}" for name, word in _THEN.items() if int(row[name])]
    return f"{row['connector']}: {', '.join(told)}; then {', '.join(then) or 'all right'}"


_THEN = {"then_wrong": "wrong", "then_failed": "failed"}


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
