"""General kernels serve whatever others were made for: a mover starts with them while the others are compiled."""

from __future__ import annotations

from .digest import DigestShape, digest_kernel
from .digest import general_program as any_digest
from .launch import Program
from .rows import general_program as any_rows
from .rows import move_kernel


def general(program: Program) -> Program | None:
    """Returns the general kernel for all that a standing program serves, or None if there is none."""
    if program.kernel is move_kernel:
        return any_rows()
    if program.kernel is digest_kernel:
        found = any_digest(None if dict(program.constants)["COPY"] else "src")
        return found if all(_has(found, shape) for shape in program.shapes if not shape.grains) else None
    return None


def _has(program: Program, needed: DigestShape) -> bool:
    """Returns True if the program has code for rows that `needed`, of any rows, serves."""
    rows = needed.element_bytes, needed.head_bytes, needed.heads
    return any(
        rows == (shape.element_bytes, shape.head_bytes, shape.heads) and shape.vec <= needed.vec
        for shape in program.shapes
    )
