"""Ranks in processes of their own, over a Gloo group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_processes_agree_over_gloo_and_acknowledge_alike(tmp_path):
    (tmp_path / "store").mkdir()
    script = Path(__file__).parent / "group_rank.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = []
    for process in processes:
        out, trouble = process.communicate(timeout=100)
        assert process.returncode == 0, trouble.decode()
        said.append(json.loads(out))
    assert [words[:2] for words in said] == [[24, 24]] * 2
    assert said[0][2] == said[1][2], "as many operations on both"
    # The other's bad page is news of the store's: whoever has not heard of it at the look-up is cut by the minimum.
    assert {json.dumps(words[3]) for words in said} <= {"{}", '{"rank_minimum": 8}'}
