"""The whole of what the tests can try, for hours: every proof, 20,000 schedules, and the long form of each attack.

`make night`, or `python -m perf.night [PATH ...]`, which gives pytest these paths or options. It keeps the number of
tests and of failures, and their time, of each folder below tests/ in night.csv. Without paths it runs the searches that
keep files of their own, too. It ends as the first of them that fails does. Two workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from perf.command_line import options
from perf.record import write

#: The long form of tests that have one of their own: 500 requests under faults, 200 on 16 processes, every variant of a
#: fault, forty times the histories of a prefix tree.
LONG = {"KVMOVER_STORM": "500", "KVMOVER_FLEETS": "200", "KVMOVER_FAULTS": "1", "KVMOVER_HISTORIES": "40"}
#: Searches that keep files of their own.
SEARCHES = ("perf.storage_faults", "perf.ring_states", "perf.all_states")
COMMAND = ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "proof or searched or night")


@dataclass(slots=True)
class Tally:
    """Tests of one folder: how many ran and failed, and the sum of their wall times."""

    tests: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = 0.0


def tallies(report: Path) -> dict[str, Tally]:
    """Returns the tally of each folder below tests/, and of tests/ itself, from a report in JUnit's form."""
    found = defaultdict[str, Tally](Tally)
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.get("classname", "").split(".")
        tally = found[path[1] if len(path) > 2 else path[0]]
        tally.tests += 1
        tally.skipped += case.find("skipped") is not None
        tally.failed += case.find("failure") is not None or case.find("error") is not None
        tally.seconds += float(case.get("time", "0"))
    return dict(sorted(found.items()))


def rows(report: Path) -> list[dict[str, object]]:
    """Returns a row for each folder, and first one for all."""
    found = tallies(report)
    total = Tally(*(sum(column) for column in zip(*map(astuple, found.values()), strict=True)))
    return [
        {
            "folder": folder,
            "tests": tally.tests,
            "skipped": tally.skipped,
            "failed": tally.failed,
            "test_s": f"{tally.seconds:.0f}",
        }
        for folder, tally in {"all": total, **found}.items()
    ]


def main() -> None:
    """Run pytest, and write night.csv."""
    parser = options(__doc__)
    parser.add_argument("paths", nargs="*")
    chosen = parser.parse_args().paths
    with TemporaryDirectory(prefix="kvmover-night-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, *COMMAND, f"--junitxml={report}", *chosen]
        done = subprocess.run(command, env={**LONG, **os.environ}, check=False)
        if report.exists():
            print(f"wrote {write('night', rows(report))}")
    ended = [done, *(subprocess.run([sys.executable, "-m", each], check=False) for each in SEARCHES if not chosen)]
    sys.exit(next((each.returncode for each in ended if each.returncode), 0))


if __name__ == "__main__":
    main()
