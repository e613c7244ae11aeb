"""What `kvmover check` says of live pairs, as rows of the run's table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvmover.tools.check.pair_verdict import CheckOutcome
from tests.live.partners import shortened
from tests.live.server import ROOT, Server
from tests.live.table import Results, Row


def checked(
    results: Results,
    engine: str,
    what: str,
    words: Sequence[str | Server],
    outcome: str = "moved",
    half: str | None = None,
) -> Mapping[str, Any]:
    """Run the command on servers and options, keep a row, and fail unless it finds this. Returns its JSON."""
    said = [word.url if isinstance(word, Server) else word for word in words]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kvmover", "check", "--json", *said],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    took_ms = round((time.monotonic() - began) * 1e3)
    assert done.stdout, f"exit status {done.returncode} {done.stderr}"
    found = json.loads(done.stdout)
    same = int((found["outcome"], found["half"]) == (outcome, half))
    told = shortened(found["sentence"])
    results.rows.append(Row(engine, f"kvmover check: {what}", 1, same, 1 - same, 0, 0.0, took_ms, took_ms, told))
    assert same, found
    assert done.returncode == CheckOutcome(outcome).status
    return found
