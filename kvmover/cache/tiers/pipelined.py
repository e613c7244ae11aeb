"""Pipelined is the agreement of ranks whose pipeline stages run apart: a stage is some rounds behind the one before.

A scheduler that waited in a round for a later stage would wait for ever: the requests and activations which that stage
needs come from the scheduler itself, later. So a round does not block. Rank 0 sees which rounds have ended on all ranks
and says so in its next round; that travels from stage to stage, as requests do. Every rank thus settles a round at the
same place among the requests, waiting only for messages sent before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.cache.tiers.agreement import VoteRow, row_of, tensor_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_TAG = 1


class Pipelined:
    """A consensus over its own torch.distributed group on CPU memory (Gloo), which the caller keeps.

    Its ranks are the stages' one after the other, `stage_ranks` each. Ranks of one stage run in step.
    """

    def __init__(self, group: dist.ProcessGroup, stage_ranks: int) -> None:
        import torch.distributed as dist

        self._group: Any = group  # the stub of a process group lacks its methods
        self._options: Any = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN
        self._source, self._readers = line(group.rank(), group.size(), stage_ranks)
        #: Unsettled rounds, and the rows that receive their minimum.
        self._rounds: deque[tuple[Any, torch.Tensor]] = deque()
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def minimum(self, values: VoteRow) -> VoteRow | None:
        """Return the minimum of the last round that rank 0 has newly seen end, or None.

        Blocks until the rank before has called as often, and those behind as often but once. Raises the group's error
        at its timeout.
        """
        row = tensor_of(values)
        self._rounds.append((self._group.allreduce([row], self._options), row))
        ended = self._heard() if self._source is not None else self._ended()
        self._tell(ended)
        agreed: VoteRow | None = None
        for _ in range(ended):
            work, row = self._rounds.popleft()
            work.wait()
            agreed = row_of(row)
        return agreed

    def _ended(self) -> int:
        """Return the number of leading rounds that have ended."""
        for count, (work, _) in enumerate(self._rounds):
            if not work.is_completed():
                return count
        return len(self._rounds)

    def _heard(self) -> int:
        """Return the same number, from the rank before."""
        said = tensor_of(np.zeros(1, np.int64))
        self._group.recv([said], self._source, _TAG).wait()
        return int(said[0])

    def _tell(self, ended: int) -> None:
        for work, _ in self._sent:
            work.wait()
        said = tensor_of(np.array([ended]))
        self._sent = [(self._group.send([said], reader, _TAG), said) for reader in self._readers]


def line(rank: int, size: int, stage_ranks: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank that a rank hears from, and those that hear from it: its own stage for rank 0, else the next one.

    >>> [line(rank, 6, 2) for rank in range(6)]
    [(None, (1, 2)), (0, (3,)), (0, (4,)), (1, (5,)), (2, ()), (3, ())]
    """
    source = None if rank == 0 else max(0, rank - stage_ranks)
    own = tuple(range(1, stage_ranks)) if rank == 0 else ()
    behind = (rank + stage_ranks,) if rank + stage_ranks < size else ()
    return source, own + behind
