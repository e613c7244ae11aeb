"""Pipelined is the agreement of ranks whose pipeline stages run apart: a stage is some rounds behind the one before it.

A scheduler that waited in a round for a later stage would wait for ever: what that stage needs to get there, the next
requests and the activations, the scheduler itself sends, later. So nobody waits for a round. Rank 0 sees which rounds
have ended on all ranks, and says it in its own next one; that travels from stage to stage, as requests do. Every rank
thus settles the same round at the same place among the requests, and no rank waits but for what was sent before.
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
    """Over a torch.distributed process group of its own on CPU memory, Gloo's for one, which the caller keeps.

    Its ranks are the stages' one after the other, `stage_ranks` each. Ranks of one stage run in step.
    """

    def __init__(self, group: dist.ProcessGroup, stage_ranks: int) -> None:
        import torch.distributed as dist

        self._group: Any = group  # the stub of a process group leaves its verbs out
        self._options: Any = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN
        self._source, self._readers = line(group.rank(), group.size(), stage_ranks)
        #: Rounds that nobody has settled yet, and the row in which the minimum comes.
        self._rounds: deque[tuple[Any, torch.Tensor]] = deque()
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def minimum(self, values: VoteRow) -> VoteRow | None:
        """Of the last round that rank 0 saw end, if one has since. Raises what the group does after its timeout.

        Blocks until the rank before has called as often, and those behind have called as often but once.
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
        """How many rounds have ended since it was last asked, in order."""
        for count, (work, _) in enumerate(self._rounds):
            if not work.is_completed():
                return count
        return len(self._rounds)

    def _heard(self) -> int:
        """The same, from the rank before."""
        said = tensor_of(np.zeros(1, np.int64))
        self._group.recv([said], self._source, _TAG).wait()
        return int(said[0])

    def _tell(self, ended: int) -> None:
        for work, _ in self._sent:
            work.wait()
        said = tensor_of(np.array([ended]))
        self._sent = [(self._group.send([said], reader, _TAG), said) for reader in self._readers]


def line(rank: int, size: int, stage_ranks: int) -> tuple[int | None, tuple[int, ...]]:
    """Whom a rank hears from, and who hears from it: rank 0 its own stage, and each rank its like in the next one.

    >>> [line(rank, 6, 2) for rank in range(6)]
    [(None, (1, 2)), (0, (3,)), (0, (4,)), (1, (5,)), (2, ()), (3, ())]
    """
    source = None if rank == 0 else max(0, rank - stage_ranks)
    own = tuple(range(1, stage_ranks)) if rank == 0 else ()
    behind = (rank + stage_ranks,) if rank + stage_ranks < size else ()
    return source, own + behind
