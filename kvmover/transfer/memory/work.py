"""The work of a copy is a value: the rows to copy, convert and digest, and the kernel launches that do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from kvmover.kernels.copy_engine import BY_ROWS, CopyEngine
from kvmover.kernels.region import Region

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.bulk import PreparedBulk
    from kvmover.kernels.convert_reference import Conversion
    from kvmover.kernels.digest_reference import End, Logical
    from kvmover.kernels.launch import Prepared, Program


@dataclass(frozen=True, slots=True)
class Programs:
    """The kernels of one direction. `digest`, `convert_digest`: fused with the copy and the conversion. `wire_digest`:
    over converted rows in the chunk, whose forms no kernel digests as it converts. `rest_digest`: over pages in place,
    as of a direct route. None: not compiled ahead.
    """

    move: Program | None = None
    digest: Program | None = None
    convert: Program | None = None
    convert_digest: Program | None = None
    wire_digest: Program | None = None
    rest_digest: Program | None = None

    def all(self) -> list[Program]:
        """Returns the kernels that are known."""
        each = self.move, self.digest, self.convert, self.convert_digest, self.wire_digest, self.rest_digest
        return [program for program in each if program is not None]


class Work(msgspec.Struct, frozen=True, eq=False):
    """The regions to copy, or to read only if both ends are the same memory. `logicals`: for a digest of `end`.

    `conversions`: rows to convert instead of copy; their `logicals` follow those of the regions. `programs`: kernels
    compiled for this peer; None: chosen by the regions, and compiled if new.
    """

    regions: Sequence[Region]
    logicals: Sequence[Logical] | None = None
    end: End = "src"
    conversions: Sequence[Conversion] = ()
    programs: Programs | None = None

    def using(self, programs: Programs | None) -> Work:
        """Returns a copy of the work with these kernels; None are chosen by the regions, and compiled if new."""
        return replace(self, programs=programs)

    @property
    def moves(self) -> bool:
        """True if bytes are copied; work for a digest alone reads them in place."""
        return bool([region for region in self.regions if region.src is not region.dst])

    @property
    def rests(self) -> bool:
        """True if rows are digested where they lie, and none is copied or converted."""
        return not self.moves and not self.conversions

    @property
    def digested(self) -> Sequence[Region]:
        """The regions that a digest reads, at `end`."""
        if not self.conversions:
            return self.regions
        return [*self.regions, *(each.at(self.end) for each in self.conversions)]


def launches(
    work: Work, sms: int | None, total: torch.Tensor | None, engine: CopyEngine = CopyEngine.AUTO
) -> Sequence[Prepared | PreparedBulk]:
    """Returns the kernel launches of some work on a GPU, in order. `total` int64 [1]: the digest is added to it.
    `engine`: the copy engine; only the row mover digests while copying.

    Rows are digested as they are copied or converted, but for those that are `undigested`. All arguments are checked,
    and tables uploaded on the current stream, before the first launch runs.
    """
    from kvmover.kernels import bulk, convert, digest, rows

    known, by_rows = work.programs or Programs(), engine in BY_ROWS
    prepare = rows.prepare if by_rows else partial(bulk.prepare, engine=engine)
    converts = partial(convert.prepare, work.conversions, sms=sms, using=known.convert)
    moves = partial(prepare, work.regions, sms=sms, using=known.move)
    left: list[tuple[Region, Logical]] = []
    if total is not None and work.logicals is not None:
        left = undigested(work, engine)
        marks = work.logicals[: len(work.regions)], work.logicals[len(work.regions) :]
        if by_rows:
            moves = partial(digest.prepare, work.regions, marks[0], total, sms=sms, using=known.digest)
        if digests_conversions(work):
            converts = partial(
                convert.prepare_with_digest,
                work.conversions,
                marks[1],
                work.end,
                total,
                sms=sms,
                using=known.convert_digest,
            )
    found: list[Prepared | PreparedBulk | None] = [
        converts() if work.conversions else None,
        moves() if work.moves else None,
    ]
    if left and total is not None:
        regions, logicals = zip(*left, strict=True)
        using = known.wire_digest if work.conversions else known.rest_digest
        found.append(digest.prepare(regions, logicals, total, sms=sms, reads=work.end, using=using))
    return [launch for launch in found if launch is not None]


def digests_conversions(work: Work) -> bool:
    """Returns True if rows with logicals are digested by the launch that converts them."""
    from kvmover.kernels.convert_overlaps import can_digest

    logicals = (work.logicals or ())[len(work.regions) :]
    return all(can_digest(*each, work.end) for each in zip(work.conversions, logicals, strict=True))


def undigested(work: Work, engine: CopyEngine) -> list[tuple[Region, Logical]]:
    """Returns the rows with logicals that no launch digests as it copies or converts them: those at rest, of an engine
    that cannot, or of forms that share words.
    """
    copied = 0 if work.moves and engine in BY_ROWS else len(work.regions)
    rows = list(zip(work.digested, work.logicals or (), strict=True))
    return [*rows[:copied], *([] if digests_conversions(work) else rows[len(work.regions) :])]
