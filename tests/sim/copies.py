"""Gathers and scatters that take virtual time, in the order they were begun, as on a stream of a GPU.

Half of the bytes are put in place at once and the others at the end. Until then nobody may change what is read or what
will be written, but who lends us its pools: memory that was given back too early shows here.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvmover.kernels.digest_reference import Logical
from kvmover.kernels.region import Region, Side
from kvmover.transfer.memory.chunk_tables import ChunkCopy
from kvmover.transfer.memory.copier import Done
from kvmover.transfer.memory.work import Work
from tests.sim.geometry import Bytes, Index
from tests.sim.network import SimNetwork


class Touched(BaseException):
    """Somebody changed memory under a running copy. No mover takes it for a fault of one of its attempts."""


@dataclass(slots=True, eq=False)
class _Rows:
    """One end of a region: the bytes of its rows in flat memory [plane, unit, head, token, byte], one array an
    allocation."""

    memory: list[Bytes]
    index: list[Index]

    @classmethod
    def of(cls, region: Region, side: Side) -> _Rows:
        inner = (np.arange(region.heads) * side.head_bytes)[:, None, None]
        inner = inner + (np.arange(region.tokens) * side.token_bytes)[:, None] + np.arange(region.row_bytes)
        at = side.units[:, None, None, None] + inner
        if (side.allocation == side.allocation[0]).all():
            return cls([side.memory[side.allocation[0]].numpy()], [side.offset[:, None, None, None, None] + at])
        planes = zip(side.allocation.tolist(), side.offset.tolist(), strict=True)
        pairs = [(side.memory[allocation].numpy(), (offset + at)[None]) for allocation, offset in planes]
        return cls([memory for memory, _ in pairs], [index for _, index in pairs])

    def read(self) -> Bytes:
        parts = [memory[index] for memory, index in zip(self.memory, self.index, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write(self, rows: Bytes) -> None:
        first = 0
        for memory, index in zip(self.memory, self.index, strict=True):
            memory[index] = rows[first : first + len(index)]
            first += len(index)


def _mark(rows: Bytes, region: Region, logical: Logical) -> int:
    """A stand-in for the digest, which is slow where rows are few: of the rows by plane, position and head."""
    heads = region.heads * logical.heads_in_row
    apart = rows.reshape(*rows.shape[:4], logical.heads_in_row, -1).transpose(0, 1, 2, 4, 3, 5)
    apart = np.ascontiguousarray(apart).reshape(rows.shape[0], rows.shape[1], heads, rows.shape[3], -1)
    where = np.concatenate([logical.planes, logical.positions, [logical.first_head, logical.head_step]])
    return zlib.crc32(apart.tobytes(), zlib.crc32(where.tobytes()))


#: A rank that has something open is polled so often at the least, be it a slow one.
NEXT_POLL_S = 0.3


@dataclass(slots=True, eq=False)
class _Copy:
    """Work under way, with the rows at both ends as they were when it was begun."""

    work: Work
    lent: set[int]
    ends: list[tuple[_Rows, _Rows, Bytes, Bytes]] = field(init=False)

    def __post_init__(self) -> None:
        """Half of the bytes are there at once: who dies under a copy leaves them."""
        self.ends = []
        for region in self.work.regions:
            src, dst = _Rows.of(region, region.src), _Rows.of(region, region.dst)
            read, there = src.read(), dst.read()
            if self.work.moves:
                there[..., ::2] = read[..., ::2]
                dst.write(there)
            self.ends.append((src, dst, read, there))

    def finish(self) -> int | None:
        for region, (src, dst, before, there) in zip(self.work.regions, self.ends, strict=True):
            read, lent = src.read(), region.src.memory[0].data_ptr() in self.lent
            if not (lent or np.array_equal(read, before)) or not np.array_equal(dst.read(), there):
                raise Touched("memory changed under a copy")
            if self.work.moves:
                there[..., 1::2] = read[..., 1::2]
                dst.write(there)
        if self.work.logicals is None:
            return None
        total = 0
        for region, logical, (_, _, rows, _) in zip(self.work.regions, self.work.logicals, self.ends, strict=True):
            total += _mark(rows, region, logical)
        return total


@dataclass(slots=True, eq=False)
class SimCopier:
    """Stands in for a mover's Copier. `on_end` hears whenever a copy puts bytes in place. `lent`: addresses of pools of
    peers, who may change what we read of them at any time.
    """

    network: SimNetwork
    owner: str
    span_s: tuple[float, float]
    on_end: Callable[[], None]
    lent: set[int] = field(default_factory=set[int])
    sms: int | None = None
    _random: Random = field(init=False)
    _busy_until: float = 0.0
    _told: float = 0.0
    _finished: deque[tuple[Done, int | None]] = field(default_factory=deque["tuple[Done, int | None]"])

    def __post_init__(self) -> None:
        self._random = Random(f"copies {self.owner}")

    @property
    def inline(self) -> bool:
        return not self.span_s[1]

    def run(self, work: Work, done: Done) -> None:
        copy = _Copy(work, self.lent)
        if self.inline:
            digest = copy.finish()
            self.on_end()
            done(digest)
            return
        self.on_end()
        begun = max(self.network.now, self._busy_until)
        self._busy_until = begun + self._random.uniform(*self.span_s)
        self.network.at(self._busy_until, lambda: self._end(copy, done))

    def copy(self, chunk: ChunkCopy, done: Done) -> None:
        self.run(chunk.here(), done)

    def _end(self, copy: _Copy, done: Done) -> None:
        if self.network.is_dead(self.owner):
            return
        try:
            digest = copy.finish()
        except Touched as error:
            raise Touched(f"{self.owner}: {error}") from None
        self.on_end()
        self._finished.append((done, digest))
        self.network.wake(self.owner)

    @property
    def busy(self) -> bool:
        """Also just after a copy: what waited for it ends with the next poll."""
        return self.network.now < self.busy_until or bool(self._finished)

    @property
    def busy_until(self) -> float:
        return max(self._busy_until, self._told + NEXT_POLL_S)

    def poll(self) -> None:
        self._told = self.network.now if self._finished else self._told
        while self._finished:
            done, digest = self._finished.popleft()
            done(digest)
