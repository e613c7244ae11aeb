"""An Upload copies small host tables to the device through a pinned ring, without a synchronise and without a race.

A reused pinned buffer races the copy that still reads it (TensorRT-LLM#15546), so each buffer of the ring has an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

RING_BUFFERS = 8


@dataclass(slots=True)
class _Buffer:
    pinned: torch.Tensor
    copied: torch.cuda.Event


@dataclass(slots=True)
class Upload:
    """One ring a device. `to_device` copies on the current stream; the returned tensor lives on that stream."""

    device: torch.device
    _ring: list[_Buffer] = field(default_factory=list[_Buffer])
    _next: int = 0

    def to_device(self, table: npt.NDArray[np.int64]) -> torch.Tensor:
        """`table` [n] int64 on the device. On a CPU device it is the same memory."""
        host = torch.from_numpy(table)
        if self.device.type == "cpu":
            return host
        buffer = self._take(len(table))
        buffer.pinned[: len(table)].copy_(host)
        out = torch.empty(len(table), dtype=torch.int64, device=self.device)
        out.copy_(buffer.pinned[: len(table)], non_blocking=True)
        buffer.copied.record()
        return out

    def _take(self, words: int) -> _Buffer:
        """The oldest buffer of the ring, once its last copy is done; grown to the next power of two when too small."""
        if len(self._ring) < RING_BUFFERS:
            self._ring.append(self._new(words))
            return self._ring[-1]
        at = self._next
        self._next = (at + 1) % RING_BUFFERS
        self._ring[at].copied.synchronize()
        if self._ring[at].pinned.numel() < words:
            self._ring[at] = self._new(words)
        return self._ring[at]

    def _new(self, words: int) -> _Buffer:
        size = 1 << max(12, (words - 1).bit_length())
        return _Buffer(torch.empty(size, dtype=torch.int64, pin_memory=True), torch.cuda.Event())
