"""`fetch` reads what covers a part: which bytes of which objects, and every cell checked before it counts as read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import msgspec
import numpy as np

from kvmover.layout import Span
from kvmover.store.catalog import MISSING, Catalog
from kvmover.store.files import SHORT, FileRun, OpenFile, reason_of
from kvmover.store.index import StoredObject
from kvmover.store.part import PageBox, PagePart
from kvmover.store.record import holds

DIGEST, EIO = "digest", os.strerror(errno.EIO)


class Fault(Enum):
    """What a failed read says: SUSPECT of the object, which is looked at again; HERE of this process or the system.

    A process that has no descriptor left, or a network that is down, knows nothing against the object.
    """

    SUSPECT = "suspect"
    HERE = "here"


@dataclass(frozen=True, slots=True)
class ObjectShare:
    """What is read of object `number` of a page: whole cells to their places, or tokens of cells by way of a copy."""

    number: int
    piece: CoverPiece
    runs: tuple[CellRun, ...]


class ObjectRead(msgspec.Struct, frozen=True, gc=False):
    """One object's share of page `item` of a batch, whose part begins at `address`."""

    item: int
    address: int
    each: StoredObject
    source: ObjectShare


@dataclass(frozen=True, slots=True)
class Failure:
    """A read that did not give the right bytes."""

    read: ObjectRead
    fault: Fault
    reason: str


def fetch(catalog: Catalog, part: PagePart, reads: Sequence[ObjectRead]) -> list[Failure]:
    """Read and check, a little at a time, so that the check finds it in the cache; what failed."""
    failures: list[Failure] = []
    size = max(1, catalog.files.group_bytes // part.nbytes)
    try:
        with catalog.lend({read.each.segment for read in reads}) as files:
            there = [read for read in reads if read.each.segment in files]
            if len(there) < len(reads):
                failures += [Failure(r, Fault.SUSPECT, MISSING) for r in reads if r.each.segment not in files]
            tables = catalog.digests([read.each for read in there])
            groups = [
                _Group.of(there[first : first + size], tables[first : first + size], part, files)
                for first in range(0, len(there), size)
            ]
            for group, reasons in zip(groups, _moved(catalog, groups), strict=True):
                failures += group.check(catalog, part, files, reasons)
    except OSError as error:
        return [Failure(read, Fault.HERE, reason_of(error)) for read in reads]
    return failures


@dataclass(frozen=True, slots=True)
class _Group:
    """Reads whose cells come in one call. `owners`: read, first cell in its object and number of cells, of each run.

    `tables`: the digests of each read's object.
    """

    reads: Sequence[ObjectRead]
    tables: Sequence[bytes]
    runs: list[FileRun]
    owners: list[tuple[int, int, int]]

    @classmethod
    def of(
        cls, reads: Sequence[ObjectRead], tables: Sequence[bytes], part: PagePart, files: dict[str, OpenFile]
    ) -> _Group:
        cell = part.cell_bytes
        group = cls(reads, tables, [], [])
        for number, read in enumerate(reads):
            if read.source.piece.tokens:
                continue
            file, offset, address = files[read.each.segment], read.each.offset, read.address
            for run in read.source.runs:
                first, count = run.source_cell, run.count
                group.runs.append(FileRun(file, offset + first * cell, address + run.part_cell * cell, count * cell))
                group.owners.append((number, first, count))
        return group

    def check(
        self, catalog: Catalog, part: PagePart, files: dict[str, OpenFile], reasons: Sequence[str]
    ) -> list[Failure]:
        """Compare what came with the digests, and fetch what must go by way of a copy."""
        bad, tables = [""] * len(self.reads), self.tables
        views = catalog.files.views(self.runs)
        for (number, first, count), view, reason in zip(self.owners, views, reasons, strict=True):
            if reason or not holds(view, count, tables[number], first):
                bad[number] = bad[number] or reason or DIGEST
        for number, read in enumerate(self.reads):
            if read.source.piece.tokens:
                memory = catalog.files.view(read.address, part.nbytes)
                bad[number] = bad[number] or _tokens(files[read.each.segment], read, tables[number], part, memory)
        return [Failure(read, _fault(reason), reason) for read, reason in zip(self.reads, bad, strict=True) if reason]


def _moved(catalog: Catalog, groups: Sequence[_Group]) -> Iterator[list[str]]:
    """The answers of every group; where there are several, the next is read while one is checked."""
    if len(groups) == 1:
        return iter([catalog.files.read(groups[0].runs)])
    return catalog.files.read_ahead(group.runs for group in groups)


def _fault(reason: str) -> Fault:
    suspect = reason in (DIGEST, MISSING, EIO) or reason.startswith(SHORT)
    return Fault.SUSPECT if suspect else Fault.HERE


def _tokens(file: OpenFile, read: ObjectRead, digests: bytes, part: PagePart, memory: memoryview) -> str:
    """Tokens out of cells that hold others too: the page was written under another context parallelism.

    A cell cannot be checked but whole, so it is read aside, checked, and the tokens are copied out.
    """
    held = read.each.part.box.tokens.tokens
    sources, targets = (list(places) for places in zip(*read.source.piece.tokens, strict=True))
    shape = (part.component.kv, part.box.tokens.tokens, part.row_bytes)
    out = np.frombuffer(memory, np.uint8).reshape(part.box.cells, *shape)
    for run in read.source.runs:
        payload = bytearray(run.count * read.each.cell_bytes)
        try:
            got = os.preadv(file.fd, [payload], read.each.offset + run.source_cell * read.each.cell_bytes)
        except OSError as error:
            return reason_of(error)
        if got < len(payload):
            return f"{SHORT} {got} of {len(payload)} bytes"
        if not holds(memoryview(payload), run.count, digests, run.source_cell):
            return DIGEST
        rows = np.frombuffer(payload, np.uint8).reshape(run.count, part.component.kv, held, part.row_bytes)
        out[run.part_cell : run.part_cell + run.count, :, targets] = rows[:, :, sources]
    return ""


@dataclass(frozen=True, slots=True)
class CoverPiece:
    """What is read of object number `source` of the candidates, whole cells only.

    `heads` and `layers` are of the model. `tokens` are pairs (place in the object's cell, place in the part's cell);
    empty where the two cells hold the same tokens, so that a cell goes to its place in one run.
    """

    source: int
    heads: Span
    layers: Span
    tokens: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CellRun:
    """`count` neighbouring cells: the first one's number in the object, and in the part."""

    source_cell: int
    part_cell: int
    count: int


@dataclass(frozen=True, slots=True)
class _Rest:
    """What is still to be covered: a range of heads and of layers, and a set of tokens as the bits of an integer."""

    heads: range
    layers: range
    tokens: int


def _bits(box: PageBox) -> int:
    return sum(1 << token for token in box.tokens)


def _range(span: Span) -> range:
    return range(span.start, span.stop)


def _both(left: range, right: range) -> range:
    return range(max(left.start, right.start), min(left.stop, right.stop))


@lru_cache(maxsize=4096)
def cover(wanted: PageBox, held: tuple[PageBox, ...]) -> tuple[CoverPiece, ...] | None:
    """Pieces of the boxes `held` that together are `wanted`, each token of each cell once; None where one is missing.

    The largest share comes first, so that one object that holds it all is one piece.

    >>> from kvmover.layout import Stripe
    >>> page = Stripe(0, 1, 64, 64)
    >>> quarters = tuple(PageBox(Span(first, 2), Span(0, 80), page) for first in (0, 2, 4, 6))
    >>> half = PageBox(Span(0, 4), Span(40, 40), page)
    >>> [(piece.source, piece.heads.triple(), piece.layers.triple()) for piece in cover(half, quarters)]
    [(0, [0, 2, 1], [40, 40, 1]), (1, [2, 2, 1], [40, 40, 1])]
    >>> cover(PageBox(Span(0, 8), Span(0, 80), page), quarters[:3]) is None
    True
    """
    whole = _Rest(_range(wanted.heads), _range(wanted.layers), _bits(wanted))
    offers = [_Rest(_range(box.heads), _range(box.layers), _bits(box)) for box in held]
    rest, pieces = [whole], list[CoverPiece]()
    for source in sorted(range(len(held)), key=lambda number: (-_size(_common(whole, offers[number])), number)):
        left: list[_Rest] = []
        for part in rest:
            taken = _common(part, offers[source])
            if not _size(taken):
                left.append(part)
                continue
            pieces.append(_piece(source, taken, held[source], wanted))
            left += _without(part, taken)
        rest = left
    return None if rest else tuple(pieces)


def _common(left: _Rest, right: _Rest) -> _Rest:
    return _Rest(_both(left.heads, right.heads), _both(left.layers, right.layers), left.tokens & right.tokens)


def _size(part: _Rest) -> int:
    return len(part.heads) * len(part.layers) * part.tokens.bit_count()


def _without(part: _Rest, taken: _Rest) -> list[_Rest]:
    """`part` without `taken`, which lies in it: up to five boxes."""
    heads, layers = part.heads, part.layers
    rests = [
        _Rest(range(heads.start, taken.heads.start), layers, part.tokens),
        _Rest(range(taken.heads.stop, heads.stop), layers, part.tokens),
        _Rest(taken.heads, range(layers.start, taken.layers.start), part.tokens),
        _Rest(taken.heads, range(taken.layers.stop, layers.stop), part.tokens),
        _Rest(taken.heads, taken.layers, part.tokens & ~taken.tokens),
    ]
    return [rest for rest in rests if _size(rest)]


def _piece(source: int, taken: _Rest, held: PageBox, wanted: PageBox) -> CoverPiece:
    heads = Span(taken.heads.start, len(taken.heads))
    layers = Span(taken.layers.start, len(taken.layers))
    if held.tokens == wanted.tokens:
        return CoverPiece(source, heads, layers)
    tokens = [token for token in wanted.tokens if taken.tokens >> token & 1]
    return CoverPiece(source, heads, layers, tuple((held.tokens.index(t), wanted.tokens.index(t)) for t in tokens))


@lru_cache(maxsize=4096)
def cell_runs(piece: CoverPiece, held: PageBox, wanted: PageBox) -> tuple[CellRun, ...]:
    """The cells of `piece` as runs that are contiguous on both sides: one where all layers are held and wanted."""
    runs: list[CellRun] = []
    for head in piece.heads:
        source = (head - held.heads.start) * held.layers.count + piece.layers.start - held.layers.start
        target = (head - wanted.heads.start) * wanted.layers.count + piece.layers.start - wanted.layers.start
        last = runs[-1] if runs else None
        if last and (last.source_cell + last.count, last.part_cell + last.count) == (source, target):
            runs[-1] = CellRun(last.source_cell, last.part_cell, last.count + piece.layers.count)
        else:
            runs.append(CellRun(source, target, piece.layers.count))
    return tuple(runs)
