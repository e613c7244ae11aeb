"""The Ideal remembers every prompt: what a cache could reuse that never forgets, and which pages of prompts are equal.

The same class stands in C in `core/ideal.c`, where it was built.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE


class Ideal:
    """Remembers of every block, after the blocks before it, how many of its first tokens were ever computed."""

    def __init__(self) -> None:
        #: Numbers of places: a block after the place before it; one that is followed when it is cut short has another.
        self._places = dict[tuple[int, int], int]()
        self._known = list[int]()

    def serve(
        self, hash_ids: Sequence[int], lengths: Sequence[int], block_tokens: int, page_tokens: int
    ) -> tuple[int, bytes]:
        """Tokens at the beginning of this prompt that an earlier one began with; then this prompt is known too.

        `lengths` are the tokens of each block, of which a whole one has `block_tokens`. With the tokens come the
        numbers of the prompt's whole pages, int64, [page]: equal for two pages where all tokens up to their ends are.
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
    """A number is of the place of the block that the page ends in, and of the how many'th page that is there."""
    firsts = places * -(-block_tokens // page_tokens)
    stops = np.cumsum(lengths)
    begins = stops - lengths
    ends = np.arange(page_tokens, int(stops[-1]) + 1, page_tokens)
    blocks = np.searchsorted(begins, ends, "left") - 1
    return firsts[blocks] + (ends - begins[blocks] - 1) // page_tokens


def new_ideal() -> Ideal:
    """An ideal that knows no prompt yet, in C where that was built."""
    return Ideal() if NATIVE is None else NATIVE.Ideal()
