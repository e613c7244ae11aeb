"""ARC (Megiddo and Modha, 2003) over the pages of a replay, to compare: no policy of the product.

A prompt's pages are used from its last to its first, so that those behind others go before them, and hits are the pages
at its beginning that are all here, as in a tree.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

import numpy as np

from kvmover.tools.replay import Requests
from kvmover.tools.replay.ideal import new_ideal


class Arc:
    """A cache of `capacity` pages, by number: used once lately (`_once`), more than once, and what went of either."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._aim = capacity, 0
        self._once, self._often, self._once_gone, self._often_gone = (OrderedDict[int, None]() for _ in range(4))

    def __contains__(self, page: int) -> bool:
        return page in self._once or page in self._often

    def use(self, page: int) -> None:
        """Use a page, which is here afterwards."""
        if page in self:
            self._once.pop(page, None)
        elif page in self._once_gone:
            step = max(1, len(self._often_gone) // len(self._once_gone))
            self._aim = min(self._capacity, self._aim + step)
            self._make_room(is_often_gone=False)
            del self._once_gone[page]
        elif page in self._often_gone:
            step = max(1, len(self._once_gone) // len(self._often_gone))
            self._aim = max(0, self._aim - step)
            self._make_room(is_often_gone=True)
            del self._often_gone[page]
        else:
            self._enter(page)
            return
        self._often[page] = None
        self._often.move_to_end(page)

    def _enter(self, page: int) -> None:
        once = len(self._once) + len(self._once_gone)
        total = once + len(self._often) + len(self._often_gone)
        if once == self._capacity and not self._once_gone:
            self._once.popitem(last=False)
        elif total >= self._capacity:
            if once == self._capacity:
                self._once_gone.popitem(last=False)
            elif total == 2 * self._capacity:
                self._often_gone.popitem(last=False)
            self._make_room(is_often_gone=False)
        self._once[page] = None

    def _make_room(self, is_often_gone: bool) -> None:
        if len(self._once) + len(self._often) < self._capacity:
            return
        over = len(self._once) > self._aim or (is_often_gone and len(self._once) == self._aim)
        source, gone = (self._once, self._once_gone) if self._once and over else (self._often, self._often_gone)
        source = source or self._once
        page, _ = source.popitem(last=False)
        gone[page] = None


def arc_hit_rate(requests: Requests, page_tokens: int, capacity_tokens: int) -> float:
    """Returns the part of all prompt tokens that ARC finds on a device of `capacity_tokens`."""
    cache, ideal, hits, total = Arc(capacity_tokens // page_tokens), new_ideal(), 0, 0
    for request in requests:
        _, row = ideal.serve(request.hash_ids, request.lengths(), request.block_tokens, page_tokens)
        pages: list[int] = np.frombuffer(row, np.int64).tolist()
        here = sum(1 for _ in takewhile(cache.__contains__, pages))
        hits += min(here, (request.input_length - 1) // page_tokens) * page_tokens
        total += request.input_length
        for page in reversed(pages):
            cache.use(page)
    return hits / total
