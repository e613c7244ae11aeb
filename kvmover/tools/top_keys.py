"""A TopState is what a viewer of `kvmover top` has chosen, by keys or options; `pressed` is its one step."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import Any

from kvmover.errors import KvmoverError
from kvmover.fields import settle
from kvmover.tools.rank_rows import SORTS

#: Rows that a page key moves by.
_PAGE = 10

#: Names of keys that are no letter, by the bytes that terminals send.
_NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}

#: Rows and bands of columns that a key moves by.
_ROWS = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -_PAGE, "page down": _PAGE}
_BANDS = {"left": -1, "h": -1, "right": 1, "l": 1}


class Fold(StrEnum):
    """A way to show ranks: each by itself, those of an engine as one row, or as one row if there are many."""

    RANKS = "ranks"
    ENGINES = "engines"
    MANY = "many"


@dataclass(frozen=True, slots=True)
class TopState:
    """The rows shown, and in what order. `first`: the first row; `band`: which part of a table too wide for the screen.

    `typing`: keys are letters of `text`. Raises KvmoverError for an unknown column.
    """

    fold: Fold = Fold.MANY
    sort: str = "name"
    text: str = ""
    first: int = 0
    band: int = 0
    typing: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        settle(self, "kvmover top", KvmoverError, fold=Fold)
        if self.sort not in SORTS:
            raise KvmoverError(f"--sort {self.sort} is none of {', '.join(SORTS)}")

    def line(self) -> str:
        """Returns the keys, with what is chosen."""
        if self.typing:
            return f"filter: {self.text}_  Enter keeps it, Esc clears it"
        chosen = f"/ filter{f': {self.text}' if self.text else ''}"
        return f"f fold  s sort: {self.sort}  {chosen}  arrows scroll  q quit"


#: Nothing chosen.
USUAL = TopState()


def pressed(state: TopState, key: str) -> TopState:
    """Returns the state after a key. Unknown keys change nothing. Pure.

    >>> pressed(TopState(), "s").sort, pressed(TopState(), "q").is_over
    ('open', True)
    """
    if state.typing:
        return _typed(state, key)
    if key in _ROWS:
        return replace(state, first=max(0, state.first + _ROWS[key]))
    if key in _BANDS:
        return replace(state, band=max(0, state.band + _BANDS[key]))
    if key in ("s", "S"):
        names = list(SORTS)
        step = 1 if key == "s" else -1
        return replace(state, sort=names[(names.index(state.sort) + step) % len(names)], first=0)
    if key == "f":
        return replace(state, fold=Fold.RANKS if state.fold == Fold.ENGINES else Fold.ENGINES, first=0)
    if key == "/":
        return replace(state, typing=True)
    if key == "escape":
        return replace(state, text="", first=0)
    return replace(state, is_over=True) if key == "q" else state


def _typed(state: TopState, key: str) -> TopState:
    if key == "enter":
        return replace(state, typing=False)
    if key == "escape":
        return replace(state, typing=False, text="", first=0)
    if key == "backspace":
        return replace(state, text=state.text[:-1], first=0)
    return replace(state, text=state.text + key, first=0) if len(key) == 1 else state


class Keyboard:
    """The keys of a terminal, without echo, while this context is open. Off a terminal no key is pressed."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Keyboard:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def key(self, within_s: float) -> str | None:
        """Returns the key that is pressed within that time, None for none."""
        if self._fd is None:
            time.sleep(within_s)
            return None
        if not select.select([self._fd], [], [], within_s)[0]:
            return None
        raw = os.read(self._fd, 16)
        return _NAMES.get(raw) or raw.decode("utf-8", "ignore")[:1] or None
