"""Consensus: the one thing that ranks tell each other, the elementwise minimum of a row of numbers.

A minimum of counts is what all ranks have. A minimum of rows of 0 and 1 is the intersection of sets: of prefix lengths,
where trailing components make some illegal, a minimum of the ranks' longest could name one that nobody has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch.distributed as dist

Row: TypeAlias = npt.NDArray[np.int64]


class Consensus(Protocol):
    """Called by every rank that serves a request together, with rows of one length, in the same order."""

    def minimum(self, values: Row) -> Row: ...


class Alone:
    """One rank, or ranks that are agreed for elsewhere."""

    def minimum(self, values: Row) -> Row:
        return values


class Grouped:
    """Over a torch.distributed process group on CPU memory, Gloo's for one: all of TP x PP x CP, once.

    The caller keeps the group, whose timeout is the deadline of a rank that died.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        import torch.distributed as dist

        self._group: Any = group  # the stub of a process group leaves its verbs out
        self._options: Any = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN

    def minimum(self, values: Row) -> Row:
        import torch

        row = torch.tensor(values.tolist(), dtype=torch.int64)
        self._group.allreduce([row], self._options).wait()
        return np.array(cast(list[int], row.tolist()), np.int64)  # pyright: ignore[reportUnknownMemberType]
