"""A Crossover says which copies between host and device the row mover makes faster than the copy engine.

It follows from the direction of a copy, from how many copies there are together, and from their mean size: a batch of
the copy engine costs by the copy, a launch of the row mover once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple

from .copy_engine import CopyEngine

if TYPE_CHECKING:
    import torch

#: The end of a copy that lies on the host: `src` for copies to the device, `dst` for copies to the host.
HostEnd = Literal["src", "dst"]

#: Pairs (copies, bytes), copies rising: from so many copies on, those of fewer bytes on average are the row mover's.
Borders = tuple[tuple[int, int], ...]

#: Times of the copy engine that a time of the row mover must save to be chosen: its SMs are the model's.
SM_PRICE = 1.1


@dataclass(frozen=True, slots=True)
class Crossover:
    """The copies between host and device that are the row mover's, by direction; all others are the copy engine's."""

    from_host: Borders
    to_host: Borders

    def engine(self, host: HostEnd, copies: int, mean_bytes: float) -> CopyEngine:
        """Returns ROWS or COPY for so many copies together, of a mean size. `host`: the end on the host."""
        below = 0
        for least_copies, border in self.from_host if host == "src" else self.to_host:
            if least_copies <= copies:
                below = border
        return CopyEngine.ROWS if mean_bytes < below else CopyEngine.COPY


#: Assumed of a machine that was not timed. vLLM's, measured on an H100 with PCIe Gen5: its kernel copies to the device
#: faster from 16 copies on, of less than 28 KiB; copies to the host are the copy engine's.
RULE = Crossover(from_host=((16, 28 << 10),), to_host=())


class Timed(NamedTuple):
    """The times of both engines for `copies` copies of `nbytes` each, in microseconds."""

    host: HostEnd
    copies: int
    nbytes: int
    rows_us: float
    copy_us: float

    @property
    def lost_by_rows(self) -> float:
        """The logarithm of the row mover's time, its SMs paid for, as a share of the copy engine's."""
        return log(SM_PRICE * self.rows_us / self.copy_us)


def fitted(times: Sequence[Timed], base: Crossover = RULE) -> Crossover:
    """Returns the crossover that loses least time, as a share of the faster engine's, over `times`.

    A direction without times is as in `base`.
    """
    from_host, to_host = ([each for each in times if each.host == end] for end in ("src", "dst"))
    return Crossover(
        _borders(from_host) if from_host else base.from_host, _borders(to_host) if to_host else base.to_host
    )


def _borders(times: Sequence[Timed]) -> Borders:
    """Returns a border for each number of copies, where it differs from that of the next smaller number."""
    found = [(0, 0)]
    for count in sorted({each.copies for each in times}):
        found.append((count, _border([each for each in times if each.copies == count], found[-1][1])))
    return tuple(after for before, after in pairwise(found) if before[1] != after[1])


def _border(times: Sequence[Timed], of_fewer: int) -> int:
    """Returns the bytes below which the row mover is to be taken for one number of copies; 0 for never.

    Between two timed sizes; if it was the better one for all, the border of fewer copies may be higher, and holds:
    longer copies were not timed for want of memory.
    """
    sizes = sorted({each.nbytes for each in times})
    between = [round(sqrt(size * after)) for size, after in pairwise([*sizes, 2 * sizes[-1]])]
    best = min((0, *between), key=lambda border: sum(each.lost_by_rows for each in times if each.nbytes < border))
    return max(best, of_fewer) if best == between[-1] else best


#: The crossovers of this process's devices.
_known: dict[torch.device, Crossover] = {}


def known(device: torch.device) -> Crossover:
    """Returns the crossover that was kept for a device, or RULE."""
    return _known.get(device, RULE)


def keep(device: torch.device, crossover: Crossover) -> None:
    """Use `crossover` for later copies between the host and a device of this process."""
    _known[device] = crossover
