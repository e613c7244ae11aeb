"""ParallelRank is the place of an engine's rank in its parallel grid, and the share of the model that it holds.

A pipeline's rank knows its own stage only: `layers_of` gives the whole model's layers from all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvmover.engines.common.contract import EngineUnsupported
from kvmover.layout import CpOrder, Fleet, Span
from kvmover.layout.fleet import Coordinate


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """A rank `tp` of `tp_size` in stage `pp` of `pp_size`, and rank `cp` of `cp_size` that share the positions.

    The grid may exist several times with equal contents: `copy` of `copies`. Data-parallel groups serve other requests
    and are not part of it.
    """

    tp: int
    tp_size: int
    pp: int = 0
    pp_size: int = 1
    cp: int = 0
    cp_size: int = 1
    cp_order: CpOrder = CpOrder.PAGE
    copy: int = 0
    copies: int = 1

    @classmethod
    def from_rank(cls, rank: int, tp_size: int, pp_size: int) -> ParallelRank:
        """Returns the place of a global `rank`, which counts tensor-parallel ranks first.

        >>> ParallelRank.from_rank(5, tp_size=4, pp_size=2).grid
        'TP4 PP2'
        """
        pp, tp = divmod(rank, tp_size)
        return cls(tp, tp_size, pp, pp_size)

    @property
    def rank(self) -> int:
        """Returns the number of this rank in its fleet, independent of the page size."""
        return self.fleet(1).rank(Coordinate(self.tp, self.pp, self.cp))

    @property
    def number(self) -> int:
        """Returns the number of this rank among all copies of the fleet, copy by copy."""
        return self.copy * self.fleet(1).size + self.rank

    @property
    def ranks(self) -> int:
        """Returns the number of all ranks."""
        return self.tp_size * self.pp_size * self.cp_size * self.copies

    def writes(self, page: bytes) -> bool:
        """Returns True if this rank's copy of the fleet writes the page of this hash.

        It uses other bytes than the election among a fleet's ranks, so the two are independent.
        """
        return int.from_bytes(page[8:16], "little") % self.copies == self.copy

    @property
    def in_stage(self) -> ParallelRank:
        """Returns the same rank within its stage, whose ranks are the only ones that can hold the same bytes.

        >>> ParallelRank(1, 2, pp=3, pp_size=4).in_stage.grid
        'TP2'
        """
        return replace(self, pp=0, pp_size=1)

    @property
    def grid(self) -> str:
        """Returns `TP2 PP3 CP2 x2`; sizes of 1 are left out but for TP."""
        named = {" PP": self.pp_size, " CP": self.cp_size, " x": self.copies}
        return f"TP{self.tp_size}" + "".join(f"{word}{size}" for word, size in named.items() if size > 1)

    def fleet(self, page_tokens: int, pages: Mapping[str, int] | None = None) -> Fleet:
        """Returns this rank's grid as a Fleet with pages of `page_tokens` tokens; `pages` has components with another
        page size.
        """
        unlike = tuple((pages or {}).items())
        return Fleet(self.tp_size, self.pp_size, self.cp_size, page_tokens, self.cp_order, unlike)

    def heads(self, total: int) -> Span:
        """Returns the heads of this rank, of `total` in the whole model."""
        return Span.share(total, self.tp_size, self.tp)

    def layers(self, total: int) -> Span:
        """Returns the layers of this rank's stage, of `total` in the whole model."""
        return Span.share(total, self.pp_size, self.pp)


def layers_of(stages: Sequence[Mapping[str, int]], setting: str) -> dict[str, int]:
    """Returns the layers of the whole model by cache, from those of each pipeline stage. `setting` names what decides
    them.

    Raises EngineUnsupported unless stages hold layers as `Fleet` divides them: stage s of S from layer s L // S on.
    """
    total: dict[str, int] = {}
    for name in dict.fromkeys(name for stage in stages for name in stage):
        held = [stage.get(name, 0) for stage in stages]
        total[name] = sum(held)
        wanted = [Span.share(total[name], len(stages), number).count for number in range(len(stages))]
        if held != wanted or 0 in held:
            raise EngineUnsupported(
                f"pipeline stages that hold {held} layers of the cache {name!r} are not transferred, {wanted} would be"
                f" ({setting} decides)"
            )
    return total
