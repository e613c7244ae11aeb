"""CopyEngine names what can move a region, for settings: without torch."""

from __future__ import annotations

from enum import StrEnum


class CopyEngine(StrEnum):
    """The engine that moves a region. AUTO: the row mover, or the copy engine for long runs between host and device.
    ROWS: the row mover. COPY: the copy engine, runs in batches; LOOP: one call a run, for drivers without batches.

    Experimental, since no GPU has measured them, and never taken by AUTO: GREEN, the row mover on SMs that are set
    aside for it; BULK, the ring of bulk copies; TENSOR, the same, with a head's rows of a page as one copy by a tensor
    map; BOXES, the copy engine, rows of a pitch in batches.
    """

    AUTO = "auto"
    ROWS = "rows"
    GREEN = "green_context"
    BULK = "ring"
    TENSOR = "tensor_ring"
    COPY = "copy"
    BOXES = "copy_3d"
    LOOP = "copy_each"


#: Engines that no GPU has measured yet: a caller has them by name, and AUTO takes none.
EXPERIMENTAL = frozenset({CopyEngine.GREEN, CopyEngine.BULK, CopyEngine.TENSOR, CopyEngine.BOXES})

#: Engines whose copies within a GPU are the row mover's under the budget, with the digest of what it reads.
BY_ROWS = frozenset({CopyEngine.AUTO, CopyEngine.ROWS})


class EngineUnavailable(RuntimeError):
    """The engine that the caller named cannot run on this machine, or cannot move a region: the message says why."""


def engine_of(given: object) -> CopyEngine:
    """The engine that `given` is, or names. Raises EngineUnavailable, with all names, for another value."""
    if isinstance(given, str) and given in CopyEngine.__members__.values():
        return CopyEngine(given)
    raise EngineUnavailable(f"engine = {given!r}; it is one of {', '.join(CopyEngine)}")
