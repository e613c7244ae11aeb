"""Every object of a segment is read in the order of the file, megabytes at a time, and compared with its digests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from operator import attrgetter

from kvmover.store.fetch import PayloadSource
from kvmover.store.record import holds
from kvmover.store.stored import StoredObject

#: Bytes of a read; the next ones are on their way meanwhile.
_READ_BYTES = 8 << 20


def suspects(
    catalog: PayloadSource, segment: str, objects: Sequence[StoredObject]
) -> Iterator[tuple[StoredObject, bool]]:
    """Each object, and whether it was not what its digests say. Not under the lock.

    Raises OSError where the data file is there and cannot be opened: that says nothing against its objects.
    """
    ordered = sorted(objects, key=attrgetter("offset"))
    tables = dict(zip(ordered, catalog.digests(ordered), strict=True))
    groups = list(_groups(ordered))
    with catalog.lend([segment]) as files:
        if segment not in files:
            yield from ((each, True) for each in ordered)
            return
        fd = files[segment].fd
        buffer = bytearray(max((_span(group) for group in groups), default=0))
        for number, group in enumerate(groups):
            if number + 1 < len(groups):
                following = groups[number + 1]
                os.posix_fadvise(fd, following[0].offset, _span(following), os.POSIX_FADV_WILLNEED)
            view = memoryview(buffer)[: _span(group)]
            try:
                got = os.preadv(fd, [view], group[0].offset)
            except OSError:  # each is asked for by itself then
                got = 0
            for each in group:
                at = each.offset - group[0].offset
                whole = at + each.nbytes <= got
                yield each, not whole or not holds(view[at : at + each.nbytes], each.cells, tables[each], 0)


def _groups(ordered: Sequence[StoredObject]) -> Iterator[list[StoredObject]]:
    """Neighbours in the file that are read at once."""
    group: list[StoredObject] = []
    for each in ordered:
        if group and each.offset + each.nbytes - group[0].offset > _READ_BYTES:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _span(group: Sequence[StoredObject]) -> int:
    return group[-1].offset + group[-1].nbytes - group[0].offset
