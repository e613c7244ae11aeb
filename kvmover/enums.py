"""Fields that are members of an enum may be given as its words: a word is taken for its member, and no other value is.

`"digest" == Integrity.DIGEST` and `"digest" is not Integrity.DIGEST`: whoever compares with `is` must not meet a word.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from kvmover.errors import KvmoverError

Kind = TypeVar("Kind", bound=Enum)


def member(kind: type[Kind], given: object, what: str, refused: type[KvmoverError]) -> Kind:
    """The member of `kind` that `given` is, or whose word it is. Raises `refused`, naming `what` and all the words.

    A word is a member's value where that is text, and its name in small letters where it is a number.
    """
    if isinstance(given, kind):
        return given
    words = {_word(each): each for each in kind}
    if isinstance(given, str) and given in words:
        return words[given]
    raise refused(f"{what} = {given!r}; it is one of {', '.join(words)}")


def settle(frozen: object, what: str, refused: type[KvmoverError], **kinds: type[Enum]) -> None:
    """For `__post_init__` of a frozen dataclass: have each field named in `kinds` be a member. Raises as `member`."""
    for name, kind in kinds.items():
        object.__setattr__(frozen, name, member(kind, getattr(frozen, name), f"{what} has {name}", refused))


def _word(each: Enum) -> str:
    return each.value if isinstance(each.value, str) else each.name.lower()
