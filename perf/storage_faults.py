"""Try every fault of a disk below a store, and every two on different pages: is all there that a flush has promised?

`python -m perf.storage_faults [STORY ...]`, ten minutes on two cores, and the end of `make night`. The stories are
those of tests/store/flush_stories.py; each is told once for every trouble of every call, and once for every two of the
seven kinds that the store tells apart. Writes storage_faults.csv, and ends with 1 if a promise was broken.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from perf.command_line import options
from perf.record import write
from tests.store.flush_stories import STORIES, Case, on_other_pages, singles, told

WORKERS = 2


@dataclass(frozen=True, slots=True)
class Tried:
    """A story told with one trouble, and with each second one: the number of pairs, and the promises broken."""

    pairs: int
    broken: tuple[str, ...]
    seconds: float


def tried(task: tuple[str, Case]) -> Tried:
    """Tell a story with a trouble, then with every other one on another page."""
    story, first = task
    folder = Path(mkdtemp(prefix="kvmover-faults-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)) / "story"
    began, broken, seconds = time.process_time(), list[str](), list[Case]()
    try:
        seconds = on_other_pages(told(story, folder, dict([first])), first)
    except AssertionError as error:
        broken.append(str(error))
    for second in seconds:
        try:
            told(story, folder, dict([first, second]))
        except AssertionError as error:
            broken.append(str(error))
    folder.parent.rmdir()
    return Tried(len(seconds), tuple(broken), time.process_time() - began)


def row(story: str, pool: Any) -> dict[str, object]:
    """Returns the row of a story."""
    folder = Path(mkdtemp(prefix="kvmover-faults-"))
    cases: list[Case] = pool.apply(singles, (story, folder / "story"))
    folder.rmdir()
    found = list(pool.imap_unordered(tried, [(story, case) for case in cases]))
    broken = [words for each in found for words in each.broken]
    return {
        "story": story,
        "calls": len({at for at, _ in cases}),
        "single_faults": len(cases),
        "pairs": sum(each.pairs for each in found),
        "promises_broken": len(broken),
        "cpu_s": f"{sum(each.seconds for each in found):.0f}",
        "example": broken[0] if broken else "",
    }


def main() -> None:
    """Try all, and print a line for each story."""
    parser = options(__doc__)
    parser.add_argument("stories", nargs="*", help="none: all")
    chosen = parser.parse_args().stories
    rows = list[dict[str, object]]()
    os.environ["PYTHONHASHSEED"] = "0"  # sets of pages have one order in all workers
    with get_context("spawn").Pool(WORKERS) as pool:
        for story in chosen or STORIES:
            rows.append(row(story, pool))
            print(*rows[-1].values(), flush=True)
    if not chosen:
        print(f"wrote {write('storage_faults', rows)}")
    sys.exit(any(found["promises_broken"] for found in rows))


if __name__ == "__main__":
    main()
