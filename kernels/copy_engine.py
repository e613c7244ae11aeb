"""CopyEngine names what can move a region, for settings and measured tables: without torch."""

from __future__ import annotations

from enum import StrEnum


class CopyEngine(StrEnum):
    """What moves a region. AUTO: what suits it. ROWS: the row mover; GREEN: the same on SMs that are set aside for it.
    BULK: the ring of bulk copies; TENSOR: the same, with a head's rows of a page as one copy by a tensor map.
    COPY: the copy engine, runs in batches; BOXES: the same, rows of a pitch in batches; LOOP: one call a run, what COPY
    falls back to.
    """

    AUTO = "auto"
    ROWS = "rows"
    GREEN = "green_context"
    BULK = "ring"
    TENSOR = "tensor_ring"
    COPY = "copy"
    BOXES = "copy_3d"
    LOOP = "copy_each"


class EngineUnavailable(RuntimeError):
    """The engine that the caller named cannot run on this machine, or cannot move a region: the message says why."""


def engine_of(given: object) -> CopyEngine:
    """The engine that `given` is, or names. Raises EngineUnavailable, with all names, for another value."""
    if isinstance(given, str) and given in CopyEngine.__members__.values():
        return CopyEngine(given)
    raise EngineUnavailable(f"engine = {given!r}; it is one of {', '.join(CopyEngine)}")
