"""An account with a mistake in none of its lines: mutants of it die, live, end their process or never end."""

from __future__ import annotations

import os


def taken(left: int, count: int) -> int:
    """Returns what is left of an account, of which no more is taken than there is."""
    if count > left:
        raise ValueError(f"{count} of {left}")
    return left - count


def counted(most: int) -> int:
    """Returns a number, slowly."""
    number = 0
    while number < most:
        number += 1
    return number


def left_alone(is_asked: bool) -> bool:
    """Ends the process if it is asked to."""
    if is_asked:
        os._exit(3)
    return is_asked
