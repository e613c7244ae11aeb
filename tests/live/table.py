"""The table of a live run: a row a scenario, printed at the end and kept as CSV."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from perf import record
from tests.live.answers import GAP, Answer, Verdict, judge


@dataclass(frozen=True, slots=True)
class Row:
    """A scenario. `wrong` answers fail the run, `failed` requests got none; `said` tells what was seen."""

    engine: str
    scenario: str
    requests: int
    same: int
    wrong: int
    failed: int
    logprob_gap: float
    p50_ms: int
    p99_ms: int
    said: str = ""


@dataclass(slots=True)
class Results:
    """The rows of a run. `engine` is set by the folder whose tests run."""

    rows: list[Row] = field(default_factory=list[Row])

    def add(
        self,
        engine: str,
        scenario: str,
        wanted: Sequence[Answer],
        got: Sequence[Answer],
        said: str = "",
        gap: float = GAP,
    ) -> Verdict:
        """Judge answers, keep the row, and fail at a wrong one. Failed requests are the caller's to judge."""
        verdict = judge(wanted, got, gap)
        times = sorted(answer.seconds * 1e3 for answer in got if answer.ok) or [0.0]
        self.rows.append(
            Row(
                engine,
                scenario,
                verdict.requests,
                verdict.same,
                len(verdict.wrong),
                len(verdict.failed),
                float(f"{verdict.gap:.1e}"),
                round(median(times)),
                round(times[min(len(times) - 1, len(times) * 99 // 100)]),
                said,
            )
        )
        assert not verdict.wrong, f"{scenario}: {verdict.wrong}"
        return verdict

    def print(self) -> None:
        table = Table(title="Answers through kvmover beside those of a plain server", title_justify="left")
        for name in ("engine", "scenario"):
            table.add_column(name, no_wrap=True)
        for name in ("requests", "same", "wrong", "failed", "gap", "p50 ms", "p99 ms"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("seen", overflow="fold")
        for row in self.rows:
            cells = [str(cell) for cell in asdict(row).values()]
            table.add_row(*cells, style="bold red" if row.wrong else None)
        Console(width=None if sys.stdout.isatty() else 160).print(table)

    def keep(self, failed_tests: Sequence[str], folder: Path = record.RESULTS) -> None:
        """Put these rows in the place of their engines' last ones in `live.csv`.

        Rows of a run in which tests failed bear the names of these. They take no place of rows of a run that passed,
        which takes the place of both.
        """
        engines, mark = {row.engine for row in self.rows}, "; ".join(failed_tests)
        before = record.read("live", folder) if (folder / "live.csv").exists() else []
        others = [row for row in before if row["engine"] not in engines or (mark and not row.get("failed_tests"))]
        rows = [{**asdict(row), "failed_tests": mark} for row in self.rows]
        record.write("live", [*rows, *({"failed_tests": "", **row} for row in others)], folder)

    def keep_beside(self, folder: Path = record.RESULTS) -> None:
        """Put these rows, of a few files whose tests all passed, in the place of those of the same scenarios."""
        rows = [{**asdict(row), "failed_tests": ""} for row in self.rows]
        record.replace("live", rows, ("engine", "scenario"), folder)
