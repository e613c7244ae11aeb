"""The Ideal remembers every prompt: the reuse of a cache without eviction, and the equal pages of prompts.

`core/ideal.c` has the same class in C.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE


class Ideal:
    """A memory, for each block after its predecessors, of the number of its first tokens ever computed."""

    def __init__(self) -> None:
        #: Place numbers by (place before, block). A shortened block that has a successor adds another place.
        self._places = dict[tuple[int, int], int]()
        self._known = list[int]()

    def serve(
        self, hash_ids: Sequence[int], lengths: Sequence[int], block_tokens: int, page_tokens: int
    ) -> tuple[int, bytes]:
        """Returns the leading tokens known from earlier prompts, and page numbers; then remembers this prompt.

        `lengths`: tokens of each block, `block_tokens` for a whole one. Page numbers are int64, [whole page], as bytes:
        two pages have equal numbers if all tokens up to their ends are equal.
        """
        known, found = self._known, array("q")
        before, reused, whole, place_of = -1, 0, True, self._places.setdefault
        for block, wanted in zip(hash_ids, lengths, strict=True):
            fresh = len(known)
            place = place_of((before, block), fresh)
            found.append(place)
            if place == fresh:
                known.append(wanted)
                whole = False
            else:
                have = known[place]
                if whole:
                    reused += min(have, wanted)
                    whole = have >= wanted
                if have < wanted:
                    known[place] = wanted
            before = place
            if wanted < block_tokens:
                before = place_of((place, -wanted), len(known))
                if before == len(known):
                    known.append(0)
        return reused, _page_numbers(np.array(found), np.array(lengths), block_tokens, page_tokens).tobytes()


def _page_numbers(
    places: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], block_tokens: int, page_tokens: int
) -> npt.NDArray[np.int64]:
    """Returns page numbers, each from the block where the page ends and the page's index in that block."""
    firsts = places * -(-block_tokens // page_tokens)
    stops = np.cumsum(lengths)
    begins = stops - lengths
    ends = np.arange(page_tokens, int(stops[-1]) + 1, page_tokens)
    blocks = np.searchsorted(begins, ends, "left") - 1
    return firsts[blocks] + (ends - begins[blocks] - 1) // page_tokens


def new_ideal() -> Ideal:
    """Returns an empty ideal, in C if built."""
    return Ideal() if NATIVE is None else NATIVE.Ideal()
