"""Ranks agree on operations: they begin them in the same order, and end each at the same moment with the same answer.

What ranks tell each other is one thing, the elementwise minimum of a row of numbers. A minimum of counts is what all
ranks have. A minimum of rows of 0 and 1 is the intersection of sets: of prefix lengths, where trailing components make
some illegal, a minimum of the ranks' longest could name one that nobody has.

A rank whose part failed, or never began for want of room, answers too: an operation has as many answers as ranks,
whatever fails, so that no collective waits for one (SGLang's controller must emit equal numbers of acknowledgements).

A round: every rank makes a row of `votes`, the rows' minimum is taken, and every rank `settle`s it. What is done on all
ranks ends, with the minimum of the answers. One collective a round serves all operations under way. Ranks that run
apart settle a round some rounds later, all of them the same one then.
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
    """Called by every rank that serves a request together, with rows of one length, in the same order."""

    def minimum(self, values: VoteRow) -> VoteRow | None:
        """The least of all ranks' numbers, place by place. May block until all have called; the row is not changed.

        Where ranks run apart it is of an earlier round, or of none that ended since: of the same on every rank.
        """
        ...


class LocalConsensus:
    """For an engine of one rank, or whose ranks agree elsewhere: the row is its own minimum."""

    def minimum(self, values: VoteRow) -> VoteRow:
        """The row itself."""
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

    def minimum(self, values: VoteRow) -> VoteRow:
        """Blocks until all ranks have called. Raises what the group does when its timeout is over."""
        row = tensor_of(values)
        self._group.allreduce([row], self._options).wait()
        return row_of(row)


def tensor_of(values: VoteRow) -> torch.Tensor:
    """A copy that a group may write to."""
    import torch

    return torch.tensor(values.tolist(), dtype=torch.int64)


def row_of(values: torch.Tensor) -> VoteRow:
    """What a group has written."""
    return np.array(cast(list[int], values.tolist()), np.int64)  # pyright: ignore[reportUnknownMemberType]


#: Rows have a multiple of this many numbers, so that ranks with different operations still meet, and find out.
_STEP = 256
_HEAD = 6


@dataclass(slots=True, eq=False)
class CollectiveOp:
    """One operation as this rank sees it. `width`: how many numbers its answer has. `ids`: a checksum.

    `ended` hears the answer of all. `stop` asks all ranks to leave off: at their next step they answer what they have.
    """

    serial: int
    width: int
    ids: int
    ended: Callable[[VoteRow], None]
    answer: VoteRow | None = None
    stop: bool = False
    #: That some rank wants it to stop, and all know.
    stopping: bool = False

    def done(self, *answer: int) -> None:
        """This rank's answer."""
        assert len(answer) == self.width
        assert self.answer is None
        self.answer = np.array(answer, np.int64)


@dataclass(slots=True)
class CollectiveOps:
    """The open operations, in order. `same_ids`: ranks use the same page ids, which is checked. `rounds`: that had one.

    `asked`: by round that is not settled, of which operations its row is.
    """

    same_ids: Callable[[Sequence[int]], int] = lambda ids: 0
    open: list[CollectiveOp] = field(default_factory=list[CollectiveOp])
    serial: int = 0
    rounds: int = 0
    asked: deque[tuple[int, tuple[CollectiveOp, ...]]] = field(
        default_factory=deque[tuple[int, tuple[CollectiveOp, ...]]]
    )

    def begin(self, ended: Callable[[VoteRow], None], width: int = 1, ids: Sequence[int] = ()) -> CollectiveOp:
        """`ended` hears the answer, `width` numbers, after `settle`. `ids`: pages that all ranks must have chosen."""
        self.serial += 1
        collective = CollectiveOp(self.serial, width, self.same_ids(ids), ended)
        self.open.append(collective)
        return collective

    def votes(self) -> VoteRow:
        """A round begins. For each open operation: whether it is done, whether it may go on, and the answer."""
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
        """Operations that are over, with their answers, and not open any more. Raises ConsensusBroken.

        `agreed`: of this round, or of an earlier one. What was done then still is, with the same answer.
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
        """The operations of a round; it and those before it are settled. None of a round that is settled, or to come.

        Round 0 is every one that had none.
        """
        if not number:
            return ()
        while self.asked and self.asked[0][0] <= number:
            of, asked = self.asked.popleft()
            if of == number:
                return asked
        return None

    def check(self) -> None:
        """Raise InvariantBroken unless operations are open in the order in which they began. O(open operations)."""
        serials = [collective.serial for collective in self.open]
        if serials != sorted(set(serials)) or max(serials, default=0) > self.serial:
            raise InvariantBroken(f"operations {serials} are open, of {self.serial} that began")
        for collective in self.open:
            if collective.answer is not None and len(collective.answer) != collective.width:
                got, due = len(collective.answer), collective.width
                raise InvariantBroken(f"operation {collective.serial} is answered by {got} of {due} numbers")


def counted(done: int, total: int) -> tuple[int, int, int]:
    """The answer, of width 3, of a rank that has done the first `done` of `total` pages."""
    return done, total, -total


class PartialWork(Enum):
    """What becomes of pages that a rank has brought and another has not: a model with further components has no use
    for a part of a prefix, whose end lacks its window and its state.
    """

    KEPT = "kept"
    DROPPED = "dropped"


def agreed_count(answer: Sequence[int] | VoteRow, partial: PartialWork) -> int:
    """How many first pages all ranks have done, from the minimum of their `counted`; none of a dropped part.

    >>> row = np.minimum(counted(5, 8), counted(8, 8))
    >>> agreed_count(row, PartialWork.KEPT), agreed_count(row, PartialWork.DROPPED)
    (5, 0)
    """
    done, least, most = int(answer[0]), int(answer[1]), -int(answer[2])
    return done if partial is PartialWork.KEPT or done == least == most else 0


def checksum(ids: Sequence[int]) -> int:
    """For `CollectiveOps.same_ids` where ranks share host memory: other ids on another rank would be other bytes."""
    return zlib.crc32(np.asarray(ids, np.int64).tobytes())
