"""What `kvmover check` says of live pairs, as rows of the run's table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tests.live.partners import shortened
from tests.live.server import ROOT, Server
from tests.live.table import Results, Row


def checked(results: Results, engine: str, what: str, *words: str | Server) -> tuple[int, Mapping[str, Any]]:
    """Run the command on servers and options, and keep a row. Returns its exit status and its JSON."""
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
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    came = int(found["outcome"] == "moved")
    results.rows.append(
        Row(engine, f"kvmover check: {what}", 1, came, 0, 1 - came, 0.0, took_ms, took_ms, shortened(found["sentence"]))
    )
    return done.returncode, found
