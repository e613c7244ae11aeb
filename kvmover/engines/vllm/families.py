"""Families are the requests that vLLM makes of one with `n` > 1: one of them is offered to decode engines, for all."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

from kvmover.transfer.protocol.content import Content

#: Families that are remembered, the latest ones: their children come together.
MOST_FAMILIES = 1024

_CHILD = re.compile(r"[0-9]+_(.+)", re.DOTALL)

#: vLLM's name of a later prompt in a list. Its parameters reach no client, since an answer has one set for all prompts.
_LATER = re.compile(r"(?:[0-9]+_)?cmpl-.*-[1-9][0-9]*-[0-9a-f]{8}", re.DOTALL)


def is_told_of(request: str) -> bool:
    """Returns True if the client learns the name under which a request is offered.

    >>> is_told_of("cmpl-7-0-0123abcd"), is_told_of("cmpl-7-1-0123abcd")
    (True, False)
    """
    return _LATER.fullmatch(request) is None


@dataclass(slots=True)
class Family:
    """The requests of one prompt and parent. `transfer` is the name by which the first one is offered. `readers` is the
    number of requests that may ask for it: 1 for a request without a parent, else at least 2, since siblings come a
    little later.
    """

    first: str
    transfer: str
    readers: int = 1
    children: int = 0


@dataclass(slots=True)
class Families:
    """The families of a prefill engine.

    >>> families, content = Families(), Content(3, b"digest")
    >>> families.of("0_cmpl-7", "0_cmpl-7", content).transfer, families.of("1_cmpl-7", "1_cmpl-7", content).transfer
    ('0_cmpl-7', '0_cmpl-7')
    >>> [families.of(name, name, content).readers for name in ("2_cmpl-7", "0_cmpl-9", "cmpl-8")]
    [3, 2, 1]
    """

    _known: OrderedDict[tuple[str, Content], Family] = field(default_factory=OrderedDict["tuple[str, Content]", Family])

    def of(self, request: str, transfer: str, content: Content) -> Family:
        """Returns the family of a request, which may be its first member. `transfer` is its name if it is offered
        alone.
        """
        child = _CHILD.fullmatch(request)
        if child is None:
            return Family(request, transfer)
        key = child[1], content
        family = self._known.setdefault(key, Family(request, transfer))
        family.children += 1
        family.readers = max(2, family.children)
        if len(self._known) > MOST_FAMILIES:
            self._known.popitem(last=False)
        return family
