"""Tables go to standard output as wide as the terminal; where there is none, too wide to wrap."""

from __future__ import annotations

from rich.console import Console

_PIPE_COLUMNS = 200


def console() -> Console:
    """Text is printed as it is: no markup, no highlighting."""
    terminal = Console(highlight=False, markup=False)
    return terminal if terminal.is_terminal else Console(highlight=False, markup=False, width=_PIPE_COLUMNS)
