"""The same measurement on this tree and on an earlier commit of it, in turn, so that a ratio has one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder that is gone afterwards."""
    with TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def samples(worker: Path, trees: dict[str, Path], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Each number that `worker` prints as JSON, by tree, one a round. One process a tree and round, one after another.

    `worker` imports kvmover from the tree it is pointed to, so it may use only names that all trees have.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, str(worker)], env=environment, cwd=tree, check=True, stdout=subprocess.PIPE, text=True
            )
            found[name].append(json.loads(done.stdout))
    return {name: {what: [run[what] for run in runs] for what in runs[0]} for name, runs in found.items()}
