"""Repeats limits equal warnings to one a key a minute."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

#: Most keys at a time, and so lines a minute: invented names cannot fill a log.
MAX_KEYS = 256

_NAMED = re.compile(r"\S*\d\S*")


def form_of(sentence: str) -> str:
    """Returns a sentence with `#` for words with digits, equal for equal warnings.

    >>> form_of("request cmpl-7 was not landed in 30.0 s")
    'request # was not landed in # s'
    """
    return _NAMED.sub("#", sentence)


@dataclass(slots=True)
class _Written:
    at_s: float
    left_out: int = 0


@dataclass(slots=True)
class Repeats:
    """A limit of written warnings, by key, in the caller's seconds.

    >>> repeats = Repeats()
    >>> repeats.more("a", 0.0), repeats.more("a", 1.0), repeats.more("a", 2.0), repeats.more("b", 2.0)
    ('', None, None, '')
    >>> repeats.more("a", 61.0)
    ' (2 more like it since the last line)'
    """

    every_s: float = 60.0
    _written: OrderedDict[Hashable, _Written] = field(default_factory=OrderedDict[Hashable, _Written])

    def more(self, key: Hashable, now_s: float) -> str | None:
        """Returns the end of a warning to be written now, or ""; None to leave it out."""
        known = self._written.get(key)
        if known is not None and now_s - known.at_s < self.every_s:
            known.left_out += 1
            return None
        if known is None and len(self._written) >= MAX_KEYS:
            oldest = next(iter(self._written.values()))
            if now_s - oldest.at_s < self.every_s:
                return None
            self._written.popitem(last=False)
        self._written[key] = _Written(now_s)
        self._written.move_to_end(key)
        return f" ({known.left_out} more like it since the last line)" if known and known.left_out else ""
