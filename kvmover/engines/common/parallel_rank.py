"""ParallelRank says where a rank of an engine stands in its parallel grid, and which share it holds.

What the whole model has, no rank of a pipeline knows alone: `layers_of` says it from what all stages hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvmover.engines.common.release import EngineUnsupported
from kvmover.layout import CpOrder, Fleet, Span
from kvmover.layout.fleet import Coordinate


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """Rank `tp` of `tp_size` in stage `pp` of `pp_size`; and rank `cp` of `cp_size` that share the positions. Of all
    these there may be several, which hold the same: `copy` of `copies`.

    Groups of data-parallel ranks serve requests of their own, and are no part of it.
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
        """`rank` counts tensor-parallel ranks first.

        >>> ParallelRank.from_rank(5, tp_size=4, pp_size=2).grid
        'TP4 PP2'
        """
        pp, tp = divmod(rank, tp_size)
        return cls(tp, tp_size, pp, pp_size)

    @property
    def rank(self) -> int:
        """The number of this rank in its fleet, whatever the page size."""
        return self.fleet(1).rank(Coordinate(self.tp, self.pp, self.cp))

    @property
    def number(self) -> int:
        """The number of this rank among all, one copy of the fleet after the other."""
        return self.copy * self.fleet(1).size + self.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tp_size * self.pp_size * self.cp_size * self.copies

    def writes(self, page: bytes) -> bool:
        """Whether of all copies of the fleet it is this rank's that writes the page of this hash.

        By other bytes than those by which the ranks of a fleet are elected: the two elections know nothing of another.
        """
        return int.from_bytes(page[8:16], "little") % self.copies == self.copy

    @property
    def in_stage(self) -> ParallelRank:
        """The same rank among those of its stage, which alone may hold what it holds.

        >>> ParallelRank(1, 2, pp=3, pp_size=4).in_stage.grid
        'TP2'
        """
        return replace(self, pp=0, pp_size=1)

    @property
    def grid(self) -> str:
        """`TP2 PP3 CP2 x2`; stages, shares of positions and copies are named where there are several."""
        named = {" PP": self.pp_size, " CP": self.cp_size, " x": self.copies}
        return f"TP{self.tp_size}" + "".join(f"{word}{size}" for word, size in named.items() if size > 1)

    def fleet(self, page_tokens: int, pages: Mapping[str, int] | None = None) -> Fleet:
        """The grid that this rank is in, as a Fleet whose pages have `page_tokens` tokens; `pages` as a Fleet's."""
        unlike = tuple((pages or {}).items())
        return Fleet(self.tp_size, self.pp_size, self.cp_size, page_tokens, self.cp_order, unlike)

    def heads(self, total: int) -> Span:
        """Of `total` heads of the whole model, those that this rank holds."""
        return Span.share(total, self.tp_size, self.tp)

    def layers(self, total: int) -> Span:
        """Of `total` layers of the whole model, those of this rank's stage."""
        return Span.share(total, self.pp_size, self.pp)


def layers_of(stages: Sequence[Mapping[str, int]], setting: str) -> dict[str, int]:
    """Layers of the whole model by cache, from those that each pipeline stage holds. `setting`: what decides that.

    Raises EngineUnsupported where they do not hold them as `Fleet` divides layers: stage s of S from layer s L // S on.
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
