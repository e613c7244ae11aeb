"""Page tables on the wire: one a component, little-endian 32-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def encoded(pages: Sequence[npt.NDArray[np.int64]]) -> tuple[bytes, ...]:
    return tuple(table.astype("<i4").tobytes() for table in pages)


def decoded(tables: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], ...]:
    """Raises ValueError where the bytes are no whole number of integers."""
    return tuple(np.frombuffer(table, "<i4").astype(np.int64) for table in tables)
