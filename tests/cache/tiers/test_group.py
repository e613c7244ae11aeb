"""Ranks in processes of their own, over a Gloo group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def said_by(script: str, ranks: int, folder: Path) -> list:
    """What each rank writes, run together."""
    here, root = Path(__file__).parent, Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, here / "ranks_apart.py", here / script, str(ranks), folder],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return [json.loads((folder / f"said-{rank}").read_text()) for rank in range(ranks)]


def test_processes_agree_over_gloo_and_acknowledge_alike(tmp_path):
    (tmp_path / "store").mkdir()
    said = said_by("group_rank.py", 2, tmp_path)
    assert [words[:2] for words in said] == [[24, 24]] * 2
    assert said[0][2] == said[1][2], "as many operations on both"
    # The other's bad page is news of the store's: whoever has not heard of it at the look-up is cut by the minimum.
    assert {json.dumps(words[3]) for words in said} <= {"{}", '{"rank_minimum": 8}'}


def test_stages_that_run_apart_end_each_operation_in_the_same_step(tmp_path):
    """A stage takes a step only when the one before has taken it: whoever waited there for the next would never end."""
    said = said_by("pipelined_rank.py", 6, tmp_path)
    assert all(words == said[0] for words in said)
    assert sorted(serial for _, serial, _ in said[0]) == list(range(1, len(said[0]) + 1))
    assert len(said[0]) > 15
    # The least of all ranks' answers: rank 0's, and what all have.
    assert all(answer == [0, 100 + serial] for _, serial, answer in said[0])
