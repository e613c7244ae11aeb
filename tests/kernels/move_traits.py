"""What sets moves apart for the kernels: their pools, how units are taken, and what a kernel is compiled to for them.

A plain run of the interpreter takes a few moves that have all of it.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from row_moves import Move

from kvmover.kernels import rows


def traits(move: Move) -> set[Hashable]:
    found: set[Hashable] = {("taken", move.taken), ("pages", np.sign(move.src.page_tokens - move.dst.page_tokens))}
    for end, pool in (("source", move.src), ("destination", move.dst)):
        found |= {(end, pool.order), (end, pool.separate), (end, "off", pool.misaligned & -pool.misaligned)}
    region = move.open().region
    if not region.nbytes:
        return found | {("nothing", move.units, move.layers)}
    cut = rows.recut(region)
    shape = rows.RowShape.of(cut, 1024)
    return found | {
        ("cut anew", cut is not region),
        ("words", shape.word_bytes, shape.vec, shape.span),
        ("units", shape.src_kind, shape.dst_kind, shape.span),
        ("grains", shape.grains > 1, shape.span),
    }
