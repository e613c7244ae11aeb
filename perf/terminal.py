"""Records what a command prints, with its colours, as an SVG that plays by itself: `terminal.py PICTURE COMMAND...`.

A line appears as long after the one before as it did, but after PAUSE_S at most; the title has the whole time. A reader
who asks for less motion, and a viewer that plays nothing, sees all lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from perf.command_line import options

COLUMNS = 118

#: Longest pause between two lines of the picture.
PAUSE_S = 1.5

#: The words of rich's picture that make its name, which is of its bytes otherwise.
_NAME = "terminal"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of output, with its ANSI colours, and the seconds from the start at which it was printed."""

    said: str
    at_s: float


def recorded(command: list[str]) -> list[Line]:
    """Returns the lines of a command. Raises CalledProcessError if it fails."""
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(COLUMNS)}
    began, lines = time.monotonic(), list[Line]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    ) as running:
        assert running.stdout is not None
        for said in running.stdout:
            lines.append(Line(said.rstrip("\n"), time.monotonic() - began))
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return lines


def picture(shown: str, lines: list[Line]) -> str:
    """Returns the SVG of a prompt with the command as it is shown, and the lines."""
    console = Console(width=COLUMNS, record=True, file=StringIO(), force_terminal=True, color_system="truecolor")
    first, appear_s, now_s = Line(f"$ {shown}", 0), list[float](), 0.0
    for before, line in pairwise([first, first, *lines]):
        now_s += min(line.at_s - before.at_s, PAUSE_S)
        text = Text.from_ansi(line.said)
        appear_s += [now_s] * len(text.wrap(console, COLUMNS))
        console.print(text)
    title = f"{lines[-1].at_s:.0f} s, played in {now_s:.0f}"
    svg = re.sub(
        r"@font-face {.*?}\s*|<!-- .*? -->\s*", "", console.export_svg(title=title, unique_id=_NAME), flags=re.DOTALL
    )
    rules = "".join(
        f'[clip-path="url(#{_NAME}-line-{row})"]{{animation:appear 1ms {at:.2f}s backwards}}'
        for row, at in enumerate(appear_s)
        if at
    )
    play = f"@keyframes appear{{from{{opacity:0}}}}@media (prefers-reduced-motion:no-preference){{{rules}}}"
    return svg.replace("</style>", f"{play}</style>", 1)


def main() -> None:
    """Record a command."""
    parser = options(__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--shown", help="the command as a reader would type it")
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args()
    lines = recorded(chosen.command)
    chosen.picture.write_text(picture(chosen.shown or " ".join(chosen.command), lines), encoding="utf-8")
    sys.stdout.writelines(f"{line.at_s:7.1f} s  {line.said}\n" for line in lines)


if __name__ == "__main__":
    main()
