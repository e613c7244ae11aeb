"""CopyEngine names the engines that move regions, for settings; it needs no torch."""

from __future__ import annotations

from enum import StrEnum


class CopyEngine(StrEnum):
    """The engine that moves a region. AUTO: the row mover; between host and device it or the copy engine, by `choose`.

    ROWS: the row mover. COPY: the copy engine, runs in batches; LOOP: one call a run, for drivers without batches.

    Not measured on a GPU, so never taken by AUTO: GREEN, the row mover on SMs set aside for it; BULK, the ring of bulk
    copies; TENSOR, the ring with one tensor-map copy for a head's rows of a page; BOXES, the copy engine with batches
    of rows at a pitch.
    """

    AUTO = "auto"
    ROWS = "rows"
    GREEN = "green_context"
    BULK = "ring"
    TENSOR = "tensor_ring"
    COPY = "copy"
    BOXES = "copy_3d"
    LOOP = "copy_each"


#: Engines that run only if named.
EXPERIMENTAL = frozenset({CopyEngine.GREEN, CopyEngine.BULK, CopyEngine.TENSOR, CopyEngine.BOXES})

#: Engines whose copies within a GPU are the row mover's, under the budget and with a digest of the bytes read.
BY_ROWS = frozenset({CopyEngine.AUTO, CopyEngine.ROWS})


class EngineUnavailable(RuntimeError):
    """The named engine cannot run on this machine, or cannot move a region: the message says why."""


def engine_of(given: object) -> CopyEngine:
    """Return the engine that `given` is or names. Raises EngineUnavailable, with all names, for another value."""
    if isinstance(given, str) and given in CopyEngine.__members__.values():
        return CopyEngine(given)
    raise EngineUnavailable(f"engine = {given!r}; it is one of {', '.join(CopyEngine)}")
