"""GrowingNumbers are one array that grows without being copied: the kernel gives it a longer range of addresses.

A copy of an index of a million objects takes longer than anybody may hold its lock.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


class GrowingNumbers:
    """Numbers of one type, zeros where nobody wrote. Memory is taken when it is written.

    `numbers` and `view` are the same memory, for numpy and for one number at a time; both are others after `grow`.
    """

    __slots__ = ("_memory", "_type", "numbers", "view")

    numbers: npt.NDArray[Any]
    view: memoryview[int]

    def __init__(self, code: str) -> None:
        """`code`: of the type, as `array` has them."""
        self._type = np.dtype(code)
        self._memory = _memory(mmap.PAGESIZE)
        self._look()

    def __len__(self) -> int:
        return len(self.numbers)

    def grow(self, count: int) -> None:
        """Have at least `count` numbers, and those that were there."""
        nbytes = -(-count * self._type.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if nbytes <= len(self._memory):
            return
        self.numbers, self.view = np.zeros(0, self._type), memoryview(b"")
        try:
            self._memory.resize(nbytes)
        except BufferError:  # somebody still looks at it
            longer = _memory(nbytes)
            longer[: len(self._memory)] = self._memory[:]
            self._memory = longer
        self._look()

    def _look(self) -> None:
        self.numbers = np.frombuffer(self._memory, self._type)
        self.view = memoryview(self.numbers.data)


def _memory(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
