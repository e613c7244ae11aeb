"""Ranks agree on operations: each begins them in one order and ends each in the same round with the same answer.

Ranks exchange only the elementwise minimum of int64 rows. The minimum of counts is the count that all have; of rows of
0 and 1 it is a set intersection, used for prefix lengths, since the minimum of the ranks' longest lengths could be
illegal on another rank.

A rank whose part failed or found no pages answers too: one answer per rank, so that no collective hangs (SGLang's
controller must emit equal numbers of acknowledgements).

A round: every rank makes a row with `votes`, and passes the rows' minimum to `settle`. Operations done on all ranks
end. One collective a round serves all open operations. Ranks that run apart settle a round some rounds later, all the
same one.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvmover.cache.prefix import InvariantBroken
from kvmover.errors import ConsensusBroken

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


VoteRow: TypeAlias = npt.NDArray[np.int64]


class Consensus(Protocol):
    """A collective of all ranks that serve a request, called in one order with rows of one length."""

    def minimum(self, values: VoteRow) -> VoteRow | None:
        """Return the elementwise minimum over all ranks, `values` unchanged. May block until all have called.

        Ranks that run apart get an earlier round's, or None if no further round has ended, alike on every rank.
        """
        ...


class LocalConsensus:
    """A consensus of one rank, or of ranks that agree elsewhere."""

    def minimum(self, values: VoteRow) -> VoteRow:
        """Return `values` itself."""
        return values


class Grouped:
    """A consensus over the caller's torch.distributed CPU group (Gloo) of all TP x PP x CP ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        import torch.distributed as dist

        self._group: Any = group  # the stub of a process group lacks its methods
        self._options: Any = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN

    def minimum(self, values: VoteRow) -> VoteRow:
        """Return the minimum. Blocks until all ranks have called; raises the group's error at its timeout."""
        row = tensor_of(values)
        self._group.allreduce([row], self._options).wait()
        return row_of(row)


def tensor_of(values: VoteRow) -> torch.Tensor:
    """Return a writable int64 CPU copy."""
    import torch

    return torch.tensor(values.tolist(), dtype=torch.int64)


def row_of(values: torch.Tensor) -> VoteRow:
    """Return a NumPy copy of a group's result."""
    return np.array(cast(list[int], values.tolist()), np.int64)  # pyright: ignore[reportUnknownMemberType]


#: Rows are padded to a multiple of this length, so that ranks with different operations still meet, and find out.
_STEP = 256
_HEAD = 6


@dataclass(slots=True, eq=False)
class CollectiveOp:
    """An operation as this rank sees it. `width`: numbers in its answer. `ids`: a checksum of page ids.

    `ended` gets the agreed answer. `stop` asks all ranks to answer, at their next step, with the pages done.
    """

    serial: int
    width: int
    ids: int
    ended: Callable[[VoteRow], None]
    answer: VoteRow | None = None
    stop: bool = False
    #: True once all ranks know that some rank asked to stop.
    stopping: bool = False

    def done(self, *answer: int) -> None:
        """Set this rank's answer, once."""
        assert len(answer) == self.width
        assert self.answer is None
        self.answer = np.array(answer, np.int64)


@dataclass(slots=True)
class CollectiveOps:
    """The open operations, in order. `same_ids`: the checksum of page ids that ranks must share.

    `rounds`: the number with an open operation. `asked`: unsettled rounds and the operations in their rows.
    """

    same_ids: Callable[[Sequence[int]], int] = lambda ids: 0
    open: list[CollectiveOp] = field(default_factory=list[CollectiveOp])
    serial: int = 0
    rounds: int = 0
    asked: deque[tuple[int, tuple[CollectiveOp, ...]]] = field(
        default_factory=deque[tuple[int, tuple[CollectiveOp, ...]]]
    )

    def begin(self, ended: Callable[[VoteRow], None], width: int = 1, ids: Sequence[int] = ()) -> CollectiveOp:
        """Open an operation. `settle` returns its answer, which its caller passes to `ended`.

        `ids`: pages that all ranks must have chosen.
        """
        self.serial += 1
        collective = CollectiveOp(self.serial, width, self.same_ids(ids), ended)
        self.open.append(collective)
        return collective

    def votes(self) -> VoteRow:
        """Begin a round. Returns for each open operation done (0/1), go on (0/1), and this rank's answer."""
        if self.open:
            self.rounds += 1
            self.asked.append((self.rounds, tuple(self.open)))
        begun = np.array([[op.serial, op.width, op.ids] for op in self.open], np.int64)
        checksum = zlib.crc32(begun.tobytes())
        number = self.rounds if self.open else 0
        head = number, -number, self.serial, -self.serial, checksum, -checksum
        parts: list[Sequence[int] | VoteRow] = [head]
        for collective in self.open:
            parts.append((collective.answer is not None, not collective.stop))
            parts.append(collective.answer if collective.answer is not None else np.zeros(collective.width, np.int64))
        row = np.concatenate([np.asarray(part, np.int64) for part in parts])
        return np.concatenate([row, np.zeros(-len(row) % _STEP, np.int64)])

    def settle(self, agreed: VoteRow) -> list[tuple[CollectiveOp, VoteRow]]:
        """Close the operations done on all ranks. Returns them with their agreed answers.

        `agreed`: an unsettled round's minimum. Raises ConsensusBroken if ranks differ in round, operations or page ids.
        """
        low, high = agreed[0:_HEAD:2], -agreed[1:_HEAD:2]
        asked = self._asked_in(int(low[0]))
        if not np.array_equal(low, high) or asked is None:
            raise ConsensusBroken(
                f"in rounds {low[0]} to {high[0]} ranks began {low[1]} to {high[1]} operations, and this one, in round"
                f" {self.rounds}, {self.serial} of which {len(self.open)} are open: they are not the same, or not with"
                " the same page ids"
            )
        at, over = _HEAD, list[tuple[CollectiveOp, VoteRow]]()
        for collective in asked:
            done, go = agreed[at : at + 2].tolist()
            answer, at = agreed[at + 2 : at + 2 + collective.width], at + 2 + collective.width
            collective.stopping = collective.stopping or not go
            if done and collective in self.open:
                self.open.remove(collective)
                over.append((collective, answer))
        return over

    def _asked_in(self, number: int) -> tuple[CollectiveOp, ...] | None:
        """Settle a round and all before; None if it is settled or in the future."""
        if not number:
            return ()
        while self.asked and self.asked[0][0] <= number:
            of, asked = self.asked.popleft()
            if of == number:
                return asked
        return None

    def check(self) -> None:
        """Raise InvariantBroken for operations out of order or answers of wrong width."""
        serials = [collective.serial for collective in self.open]
        if serials != sorted(set(serials)) or max(serials, default=0) > self.serial:
            raise InvariantBroken(f"operations {serials} are open, of {self.serial} that began")
        for collective in self.open:
            if collective.answer is not None and len(collective.answer) != collective.width:
                got, due = len(collective.answer), collective.width
                raise InvariantBroken(f"operation {collective.serial} is answered by {got} of {due} numbers")


def counted(done: int, total: int) -> tuple[int, int, int]:
    """Return a rank's answer, of width 3: the first `done` pages are done."""
    return done, total, -total


class PartialWork(Enum):
    """A choice for pages that some ranks alone have brought.

    DROPPED is for models with window or state components, found at a prefix's end alone.
    """

    KEPT = "kept"
    DROPPED = "dropped"


def agreed_count(answer: Sequence[int] | VoteRow, partial: PartialWork) -> int:
    """Return the leading pages done on all ranks, from the minimum of `counted`; with DROPPED all or 0.

    >>> row = np.minimum(counted(5, 8), counted(8, 8))
    >>> agreed_count(row, PartialWork.KEPT), agreed_count(row, PartialWork.DROPPED)
    (5, 0)
    """
    done, least, most = int(answer[0]), int(answer[1]), -int(answer[2])
    return done if partial is PartialWork.KEPT or done == least == most else 0


def checksum(ids: Sequence[int]) -> int:
    """Return the CRC-32 of page ids."""
    return zlib.crc32(np.asarray(ids, np.int64).tobytes())


_TAG = 1


class Pipelined:
    """A consensus of ranks whose pipeline stages run apart: a stage is some rounds behind the one before.

    A scheduler that waited in a round for a later stage would wait for ever: the activations which that stage needs
    come from the scheduler itself, later. So a round does not block. Rank 0 sees which rounds have ended on all ranks
    and says so in its next round; that travels from stage to stage, as requests do. Every rank thus settles a round at
    the same place among the requests.

    It has its own torch.distributed group on CPU memory (Gloo), which the caller keeps. The group's ranks are the
    stages' one after the other, `stage_ranks` each. Ranks of one stage run in step.
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

        Blocks until the rank before has called as often, and those behind but once fewer. Raises the group's error at
        its timeout.
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
        for count, (work, _) in enumerate(self._rounds):
            if not work.is_completed():
                return count
        return len(self._rounds)

    def _heard(self) -> int:
        said = tensor_of(np.zeros(1, np.int64))
        self._group.recv([said], self._source, _TAG).wait()
        return int(said[0])

    def _tell(self, ended: int) -> None:
        for work, _ in self._sent:
            work.wait()
        said = tensor_of(np.array([ended]))
        self._sent = [(self._group.send([said], reader, _TAG), said) for reader in self._readers]


def line(rank: int, size: int, stage_ranks: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank that a rank hears from, and those that hear from it: own stage for rank 0, else the next.

    >>> [line(rank, 6, 2) for rank in range(6)]
    [(None, (1, 2)), (0, (3,)), (0, (4,)), (1, (5,)), (2, ()), (3, ())]
    """
    source = None if rank == 0 else max(0, rank - stage_ranks)
    own = tuple(range(1, stage_ranks)) if rank == 0 else ()
    behind = (rank + stage_ranks,) if rank + stage_ranks < size else ()
    return source, own + behind
