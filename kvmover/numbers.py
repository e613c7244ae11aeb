"""Numbers from callers are checked: whole ones of any integer type, finite ones for times. Others are refused."""

from __future__ import annotations

import math
from operator import index

from kvmover.errors import KvmoverError


def whole(given: object, what: str, refused: type[KvmoverError], least: float = 0) -> int:
    """`given` as an int. Raises `refused`, naming `what` and the value, for no whole number and for one below `least`.

    `5.0` and True are no whole numbers: whoever wrote them meant something else.
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
    """For `__post_init__` of a frozen dataclass: have each field named in `least` be an int. Raises as `whole`."""
    for name, lowest in least.items():
        object.__setattr__(frozen, name, whole(getattr(frozen, name), f"{what} has {name}", refused, lowest))


def check_positive(frozen: object, what: str, refused: type[KvmoverError], *names: str) -> None:
    """Raise `refused` for the first of these fields that is no finite number above 0."""
    for name in names:
        given = getattr(frozen, name)
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
            raise refused(f"{what} has {name} = {given!r}; it must be positive")
