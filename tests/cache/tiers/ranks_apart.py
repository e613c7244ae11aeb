"""Runs `main(rank, size, folder)` of a script in one process a rank, forked when the imports of all are done.

What a rank prints is in the folder, in `said-RANK`.

    ranks_apart.py SCRIPT SIZE FOLDER
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def main(script: str, size: int, folder: Path) -> None:
    run = runpy.run_path(script)["main"]
    ranks: list[int] = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            _become(run, rank, size, folder)
        ranks.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    sys.exit(any(statuses))


def _become(run: Callable[[int, int, Path], None], rank: int, size: int, folder: Path) -> None:
    with (folder / f"said-{rank}").open("w") as said:
        os.dup2(said.fileno(), 1)
    try:
        run(rank, size, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
