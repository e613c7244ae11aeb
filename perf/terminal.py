"""A recorded terminal of the demo in English, and its picture: `python -m perf.terminal [--record]` draws it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from perf.record import RESULTS

RECORDING, PICTURE = RESULTS / "demo_smollm2.txt", Path(__file__).parent.parent / "docs" / "demo-smollm2.svg"
_COMMAND = "from kvmover.cli import main; main()"
_WIDTH = 110


def record() -> str:
    """The output of a run that passed, with its colours; lines of peers that were killed are left out."""
    call = [sys.executable, "-c", _COMMAND, "demo", "--scenario", "smollm2"]
    terms = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(_WIDTH)}
    ran = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, env=terms)
    return "".join(f"{line}\n" for line in ran.stdout.split("\n") if "leaving-" not in line and "\x1b[?25" not in line)


def drawn(recording: str) -> str:
    """The picture of a recording, without fonts of another place."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ kvmover demo --scenario smollm2", "bold"))
    console.print(Text.from_ansi(recording.strip()))
    svg = console.export_svg(title="kvmover demo", unique_id="smollm2")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    if "--record" in sys.argv:
        RECORDING.write_text(record())
    PICTURE.write_text(drawn(RECORDING.read_text()))
