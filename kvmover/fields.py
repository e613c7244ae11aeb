"""Fields of values are checked here, and words become enum members."""

from __future__ import annotations

import math
from difflib import get_close_matches
from enum import Enum
from operator import index
from typing import TypeVar

from kvmover.errors import KvmoverError

Kind = TypeVar("Kind", bound=Enum)


def member(kind: type[Kind], given: object, what: str, refused: type[KvmoverError]) -> Kind:
    """Returns a member of `kind`, given itself or its word. Raises `refused`, naming `what` and all words.

    A word is a member's text value, or else its small name.
    """
    if isinstance(given, kind):
        return given
    words = {_word(each): each for each in kind}
    if isinstance(given, str) and given in words:
        return words[given]
    raise refused(f"{what} = {given!r}; it is one of {', '.join(words)}{nearest(given, list(words))}")


def nearest(given: object, known: list[str]) -> str:
    """Returns the end of a message about an unknown name; "" if `known` has no similar one.

    >>> nearest("deadlines_s", ["deadline_s", "verb"]), nearest("x", ["deadline_s"])
    ('; did you mean deadline_s?', '')
    """
    found = get_close_matches(given, known, 1, 0.5) if isinstance(given, str) else []
    return f"; did you mean {found[0]}?" if found else ""


def settle(frozen: object, what: str, refused: type[KvmoverError], **kinds: type[Enum]) -> None:
    """Turn fields of a frozen dataclass into members. Raises as `member`."""
    for name, kind in kinds.items():
        given = getattr(frozen, name)
        if not isinstance(given, kind):
            object.__setattr__(frozen, name, member(kind, given, f"{what} has {name}", refused))


def _word(each: Enum) -> str:
    return each.value if isinstance(each.value, str) else each.name.lower()


def whole(given: object, what: str, refused: type[KvmoverError], least: float = 0) -> int:
    """Returns `given` as an int. Raises `refused`, naming `what`, unless it is a whole number from `least`; 5.0 and
    True are refused.
    """
    try:
        number = None if isinstance(given, bool) else index(given)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = None
    if number is None:
        raise refused(f"{what} = {given!r}; it must be a whole number")
    if number < least:
        raise refused(f"{what} = {number}; it must {f'be at least {least}' if least else 'not be negative'}")
    return number


def settle_whole(frozen: object, what: str, refused: type[KvmoverError], **least: int) -> None:
    """Turn fields of a frozen dataclass into ints. Raises as `whole`."""
    for name, lowest in least.items():
        object.__setattr__(frozen, name, whole(getattr(frozen, name), f"{what} has {name}", refused, lowest))


def check_positive(frozen: object, what: str, refused: type[KvmoverError], *names: str) -> None:
    """Raise `refused` for the first field that is not finite and above 0."""
    for name in names:
        given = getattr(frozen, name)
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
            raise refused(f"{what} has {name} = {given!r}; it must be positive")


def common_version(own: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """Returns the highest version in both ranges [least, most]; None if they have none in common."""
    version = min(own[1], theirs[1])
    return version if version >= max(own[0], theirs[0]) else None
