"""`id_runs` finds runs of consecutive page ids, so that a few slices of a table stand for many ids."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE


def id_runs_in_python(ids: npt.NDArray[np.int32], most: int) -> list[slice]:
    """See `id_runs`.

    >>> id_runs_in_python(np.array([4, 5, 6, 2, 3], np.int32), 2)
    [slice(4, 7, None), slice(2, 4, None)]
    """
    ends = np.flatnonzero(ids[1:] != ids[:-1] + 1)
    if len(ends) >= most or not len(ids):
        return []
    firsts, lasts = [0, *(ends + 1).tolist()], [*ends.tolist(), len(ids) - 1]
    return [slice(int(ids[first]), int(ids[last]) + 1) for first, last in zip(firsts, lasts, strict=True)]


#: `(ids, most)`: returns contiguous int32 `ids` as slices of consecutive ids, in order; empty if they are more than
#: `most`.
id_runs: Callable[[npt.NDArray[np.int32], int], list[slice]] = getattr(NATIVE, "id_runs", id_runs_in_python)
