"""The sequence chart of a counterexample: a column a process, a line a message, and the property that broke."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.sim.copies import Touched
from tests.sim.scene import Broken
from tests.states.search import Begin, Counterexample

#: Characters from one process to the next.
WIDTH = 34


def charted(title: str, begin: Begin, broken: Counterexample) -> str:
    """Returns the chart of a counterexample, and the choices that lead to it: a test of its own, for `replayed`."""
    play = begin()
    play.network.trace = trace = list[str]()
    try:
        for choice in broken.path:
            play.act(choice)
    except (Broken, Touched):
        pass
    names = play.names
    head = "".join(name.ljust(WIDTH) for name in names).rstrip()
    lines = (line for text in trace for line in drawn(names, re.sub(r"^\s*[\d.]+  ", "", text)))
    return "\n".join([title, head, *lines, broken.why, f"{begin}", f"{broken.path}"])


def drawn(names: list[str], text: str) -> Iterator[str]:
    """Returns the line of an event: an arrow of a message or operation, or a star below its process."""
    arrow = re.match(r"(\S+) (->|=>|<=) (\S+) (.*)", text)
    if arrow is None:
        owner = next((number for number, name in enumerate(names) if text.startswith(name)), 0)
        yield " " * WIDTH * owner + "* " + text.removeprefix(f"{names[owner]}: ")
        return
    sender, sign, peer, told = arrow.groups()
    left, right = sorted((names.index(sender), names.index(peer)))
    length = WIDTH * (right - left) - 3
    body = f" {shortened(told)} "[:length].center(length, "-" if sign == "->" else "=")
    to_the_right = (names.index(sender) < names.index(peer)) != (sign == "<=")
    yield " " * WIDTH * left + (f"|{body}>" if to_the_right else f"<{body}|")


def shortened(told: str) -> str:
    """Returns messages by their names, and an operation by its chunk."""
    chunk = re.search(r"chunk=(\d+)", told)
    text = told.replace("write of Chunk", f"write of chunk {chunk[1]}" if chunk else "")
    while (inner := re.sub(r"\([^()]*\)", "", text)) != text:
        text = inner
    return text
