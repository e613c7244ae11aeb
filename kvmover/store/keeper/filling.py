"""A SlabWriter puts objects into the slab that its keeper has granted, and commits them; another one when it is full.

Payloads first, then the question that commits them: who dies between the two leaves nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmover.store.files import FileRun, OpenFile, reason_of
from kvmover.store.keeper.catalog import KeeperCatalog
from kvmover.store.keeper.journal import slab_name, slab_number
from kvmover.store.keeper.link import KeeperRefused, StoreFenced
from kvmover.store.keeper.messages import (
    PACKET_BYTES,
    Agreed,
    AllocateSlab,
    CommitObjects,
    CommittedObject,
    KeeperRefusal,
    SlabToFill,
)
from kvmover.store.objects import ObjectDraft
from kvmover.store.part import PagePart, PartKey
from kvmover.store.policy import Policy
from kvmover.store.record import DIGEST_BYTES, FIXED_BYTES, encode_part, table
from kvmover.store.stored import padded

#: What a commit takes beside its objects, and an object beside what a record has; more than they need.
_BESIDE_BYTES = 512

#: A namespace with a quota is at least so many slabs, since they are evicted whole.
_SLABS = 8

#: Why a slab can be written no more: the keeper took it back.
_SEALED = (errno.EPERM, errno.EBADF)


@dataclass(slots=True, eq=False)
class _FilledSlab:
    """A slab that is being filled, from byte `end` on."""

    number: int
    nbytes: int
    file: OpenFile
    end: int = 0


class SlabWriter:
    """The slab of one client. Its methods are for one thread at a time."""

    def __init__(self, catalog: KeeperCatalog, policy: Policy) -> None:
        self._catalog, self._policy = catalog, policy
        self._slab: _FilledSlab | None = None

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        """Put objects whole: of each "", or why it is not there."""
        each_bytes = FIXED_BYTES + part.box.cells * DIGEST_BYTES + 64
        most = (PACKET_BYTES - _BESIDE_BYTES) // each_bytes
        if not most:
            return [f"{part.box.cells} cells are more than a keeper takes of a page"] * len(drafts)
        done, doubted = 0, False
        while done < len(drafts):
            try:
                slab = self._slab_for(padded(part.nbytes), keep)
                count = min(most, (slab.nbytes - slab.end) // padded(part.nbytes))
                some = drafts[done : done + count]
                self._put_some(slab, part, key, some)
            except (OSError, StoreFenced) as error:
                self._let_go()
                took_back = isinstance(error, KeeperRefused) and error.refusal is KeeperRefusal.GONE
                if doubted or not (took_back or getattr(error, "errno", 0) in _SEALED) or _is_fenced(error):
                    reason = reason_of(error) if isinstance(error, OSError) else str(error)
                    return [""] * done + [reason] * (len(drafts) - done)
                doubted = True
                continue
            done, doubted = done + len(some), False
        return [""] * done

    def _slab_for(self, nbytes: int, keep: Collection[bytes]) -> _FilledSlab:
        """One with room for `nbytes`. Raises OSError, or StoreFenced."""
        link = self._catalog.link
        if link.fenced is not None:
            raise link.fenced
        if self._slab is not None and self._slab.nbytes - self._slab.end >= nbytes:
            return self._slab
        self._let_go()
        link.connect()
        quota = self._policy.quota_bytes
        size = min(link.slab_bytes, self._policy.segment_bytes)
        size = size if quota is None else min(size, quota // _SLABS)
        granted, fd = link.ask(AllocateSlab(nbytes, size, quota, self._slabs_of(keep)), SlabToFill)
        file = OpenFile.of_descriptor(fd, Path("/keeper") / slab_name(granted.slab))
        self._slab = _FilledSlab(granted.slab, granted.nbytes, file)
        return self._slab

    def _slabs_of(self, pages: Collection[bytes]) -> list[int]:
        index = self._catalog.index
        with self._catalog.lock:
            return sorted({slab_number(name) for name, _ in index.placed(index.pages_at(list(pages))).by_segment()})

    def _put_some(self, slab: _FilledSlab, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft]) -> None:
        """Payloads a few at a time, while they are in the cache for their digests, and one commit. Raises OSError."""
        size, files = part.nbytes, self._catalog.files
        count = max(1, files.group_bytes // size)
        name, end = encode_part(key), slab.end
        objects: list[CommittedObject] = []
        for first in range(0, len(drafts), count):
            runs: list[FileRun] = []
            for draft in drafts[first : first + count]:
                digests = table(files.view(draft.address, size), part.box.cells)
                objects.append(CommittedObject(end, size, draft.page, name, digests))
                runs.append(FileRun(slab.file, end, draft.address, size))
                end += padded(size)
            for reason in files.write(runs):
                if reason:
                    raise OSError(errno.EPERM, reason)
        self._catalog.link.ask(CommitObjects(slab.number, objects), Agreed)
        slab.end = end

    def _let_go(self) -> None:
        if self._slab is not None:
            self._slab.file.close()
        self._slab = None

    def close(self) -> None:
        """Fill nothing more. Safe to call twice."""
        self._let_go()


def _is_fenced(error: Exception) -> bool:
    return isinstance(error, StoreFenced) or (
        isinstance(error, KeeperRefused) and error.refusal is KeeperRefusal.FENCED
    )
