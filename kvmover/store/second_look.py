"""A second look at an object: by files opened for it, past this process's and the backend's memory. Under no lock."""

from __future__ import annotations

import os
from pathlib import Path

from kvmover.store.absence import is_data_missing
from kvmover.store.files import close_quietly, is_absent, open_shared
from kvmover.store.machine import NO_BOOT
from kvmover.store.objects import Verdict
from kvmover.store.record import BLOCK_BYTES, DIGEST_BYTES, FIXED_BYTES, decode, holds
from kvmover.store.segment import Life, Segment
from kvmover.store.stored import StoredObject

#: Reasons against an object without a file, or with a hole in it: its blocks were given back by whom this process has
#: not heard, or never came to the disk before a power cut. Nothing says that the disk is bad.
MISSING, BLANK = "data file is missing", "blank"
GIVEN_BACK = (MISSING, BLANK)


def look_again(folder: Path, each: StoredObject) -> tuple[Verdict, str]:
    """What the files in `folder` say of an object, read anew, and why.

    Raises OSError where the system does not say: that is nothing against the object, however often.
    """
    segment = Segment(folder, each.segment, NO_BOOT, Life.SEALED)
    try:
        fd = open_shared(segment.head)
    except OSError as error:
        if segment.is_removed(error):
            return Verdict.GONE, "evicted"
        raise
    try:
        raw = os.pread(fd, FIXED_BYTES + each.cells * DIGEST_BYTES, each.record)
    finally:
        close_quietly(fd)
    header = decode(raw, each.record, each.record)
    if not segment.state_anew(each.record)[0]:
        return Verdict.GONE, "evicted"
    if header is None or header.page != each.page:
        return Verdict.BAD, "damaged header"
    return _look_at_payload(segment, each, header.digests)


def _look_at_payload(segment: Segment, each: StoredObject, digests: bytes) -> tuple[Verdict, str]:
    payload, fd = bytearray(each.nbytes), -1
    try:
        fd = open_shared(segment.data)
        got = os.preadv(fd, [payload], each.offset)
    except OSError as error:
        if not is_absent(error):
            raise
        if not segment.state_anew(each.record)[0]:
            return Verdict.GONE, "evicted"
        if is_data_missing(segment):
            return Verdict.BAD, MISSING
        raise  # a name that a listing has
    finally:
        close_quietly(fd)
    if got < each.nbytes:
        return Verdict.BAD, "truncated"
    if holds(memoryview(payload), each.cells, digests, 0):
        return Verdict.WELL, ""
    if not segment.state_anew(each.record)[0]:
        return Verdict.GONE, "evicted"
    return Verdict.BAD, BLANK if _has_blank(payload) else "digest"


def _has_blank(payload: bytearray) -> bool:
    """Whether a whole block of a payload that is not what was written is zeros: it is a hole in the file."""
    blocks = range(0, len(payload), BLOCK_BYTES)
    return any(payload.count(0, at, at + BLOCK_BYTES) == len(payload[at : at + BLOCK_BYTES]) for at in blocks)
