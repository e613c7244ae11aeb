"""A Calibration has a link's measured numbers, changes the costs that a route is chosen by, and is kept in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvmover.errors import PlanError
from kvmover.plan.cost import Costs, Posting

_FORMAT = "kvmover.calibration/1"
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One link's measured numbers, in the units of Costs; None where nothing was measured.

    `writes`, `chunks`: samples behind them. `operation_us` is what a write takes however small. `noise`: the typical
    error of a single write's predicted time, as a share of it.
    """

    host: str
    transport: str
    posting: Posting
    writes: int
    chunks: int
    noise: float | None = None
    operation_us: _Positive | None = None
    descriptor_us: _Positive | None = None
    wire_rate: _Positive | None = None
    gather_rate: _Positive | None = None
    scatter_rate: _Positive | None = None
    chunk_us: _Positive | None = None

    def costs(self, base: Costs) -> Costs:
        """`base` with every number that was measured in place of its own."""
        names = ("descriptor_us", "wire_rate", "gather_rate", "scatter_rate", "chunk_us")
        measured = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(base, posting=self.posting, **measured)

    def why(self, base: Costs) -> str:
        """One line: `decode-3 over UCX, 412 writes and 0 chunks: 7.1 us a descriptor, gather 160 GB/s (assumed)`."""
        costs = self.costs(base)
        words = (
            (self.descriptor_us, f"{costs.descriptor_us:.3g} us a descriptor"),
            (self.wire_rate, f"{costs.wire_rate / 1e3:.3g} GB/s on the wire"),
            (self.gather_rate, f"gather {costs.gather_rate / 1e3:.3g} GB/s"),
            (self.scatter_rate, f"scatter {costs.scatter_rate / 1e3:.3g} GB/s"),
            (self.chunk_us, f"{costs.chunk_us:.3g} us a chunk"),
        )
        numbers = ", ".join(text if value is not None else f"{text} (assumed)" for value, text in words)
        return f"{self.host} over {self.transport}, {self.writes} writes and {self.chunks} chunks: {numbers}"


class _File(msgspec.Struct, frozen=True):
    format: Literal["kvmover.calibration/1"]
    links: tuple[Calibration, ...]


def save(path: Path, links: Sequence[Calibration]) -> None:
    """Write `links` as JSON, whole or not at all. Raises PlanError where that cannot be."""
    text = msgspec.json.format(msgspec.json.encode(_File(_FORMAT, tuple(links))))
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(text + b"\n")
        beside.replace(path)
    except OSError as error:
        raise PlanError(f"cannot write the calibration {path}: {error.strerror}") from error


def load(path: Path) -> tuple[Calibration, ...]:
    """Raises PlanError with what is wrong with the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).links
    except OSError as error:
        raise PlanError(f"cannot read the calibration {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise PlanError(f"{path} is not a calibration: {error}") from error


def link_to(links: Sequence[Calibration], name: str | None) -> Calibration:
    """The link to host `name`, or to `host/transport`, or the only one there is. Raises PlanError, naming all."""
    found = [link for link in links if name in (None, link.host, f"{link.host}/{link.transport}")]
    if len(found) != 1:
        known = ", ".join(f"{link.host}/{link.transport}" for link in links) or "none"
        raise PlanError(
            f"{len(found)} links are named {name or 'anything'}; the calibration has {known}, and one is needed"
        )
    return found[0]
