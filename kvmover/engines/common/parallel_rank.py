"""ParallelRank says where a rank of an engine stands, tensor and pipeline parallel, and which share it holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.layout import Fleet, Span
from kvmover.layout.fleet import Coordinate


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """Rank `tp` of `tp_size` in stage `pp` of `pp_size`. It holds every position of a request.

    Neither engine's context-parallel ranks nor its data-parallel ones are part of it: adapters refuse caches that are
    cut by position, and groups of data-parallel ranks serve requests of their own.
    """

    tp: int
    tp_size: int
    pp: int = 0
    pp_size: int = 1

    @classmethod
    def from_rank(cls, rank: int, tp_size: int, pp_size: int) -> ParallelRank:
        """`rank` counts tensor-parallel ranks first.

        >>> ParallelRank.from_rank(5, tp_size=4, pp_size=2)
        ParallelRank(tp=1, tp_size=4, pp=1, pp_size=2)
        """
        pp, tp = divmod(rank, tp_size)
        return cls(tp, tp_size, pp, pp_size)

    @property
    def rank(self) -> int:
        """The number of this rank in its fleet, whatever the page size."""
        return self.fleet(1).rank(Coordinate(self.tp, self.pp, 0))

    @property
    def grid(self) -> str:
        """`TP2 PP3`; stages are named where there are several."""
        return f"TP{self.tp_size}" + f" PP{self.pp_size}" * (self.pp_size > 1)

    def fleet(self, page_tokens: int) -> Fleet:
        """The grid that this rank is in, as a Fleet whose pages have `page_tokens` tokens."""
        return Fleet(tp=self.tp_size, pp=self.pp_size, page_tokens=page_tokens)

    def heads(self, total: int) -> Span:
        """Of `total` heads of the whole model, those that this rank holds."""
        return Span.share(total, self.tp_size, self.tp)

    def layers(self, total: int) -> Span:
        """Of `total` layers of the whole model, those of this rank's stage."""
        return Span.share(total, self.pp_size, self.pp)
