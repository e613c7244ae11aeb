"""Payloads are read again, one segment at a time or one object at a time, and each verdict has its own reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from failing_calls import failing
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.layout import CpOrder, Fleet, Span
from kvmover.store import Got, PageBox, PagePart, PageStore
from kvmover.store import fetch as reading
from kvmover.store.fetch import BLANK, MISSING, look_again, suspects
from kvmover.store.files import SHORT
from kvmover.store.objects import DIGEST, Verdict
from kvmover.store.segment_objects import SegmentObjects
from kvmover.store.stored import StoredObject
from tests.store.segments import LOOKS, objects_in, segments_of

WHOLE = PagePart.whole(GQA, PAGE)
PAGES = pages_of(5)
GONE, DAMAGED = (Verdict.GONE, "evicted"), (Verdict.BAD, "damaged header")


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[SegmentObjects]:
    """A store of five pages in one segment."""
    with PageStore.open(tmp_path, SPACE) as store:
        assert all(r.ok for r in Rank(store, WHOLE).put(PAGES))
        store.flush()
        yield segments_of(store)


def write(segments: SegmentObjects, suffix: str, at: int, raw: bytes) -> None:
    (path,) = segments.folder.glob(f"*{suffix}")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)


def kill(segments: SegmentObjects, each: StoredObject) -> None:
    """Mark an object as dead, as another process does."""
    permit = segments.permit(LOOKS)
    assert permit is not None
    segments.catalog.segments[each.segment].kill([each.record], permit)


def looked_at(segments: SegmentObjects, each: StoredObject) -> tuple[Verdict, str]:
    """The verdict of a second look, which opens files and closes them."""
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        return look_again(segments.folder, each)
    finally:
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_second_look_says_why(segments: SegmentObjects) -> None:
    well, flipped, blank, killed, spoilt = objects_in(segments)
    write(segments, ".data", flipped.offset + 17, b"\x01\xfe")
    write(segments, ".data", blank.offset, bytes(4096))
    write(segments, ".head", killed.record + 60, b"\x01\xfe")
    kill(segments, killed)
    write(segments, ".head", spoilt.record + 60, b"\x01\xfe")
    assert looked_at(segments, well) == (Verdict.WELL, "")
    assert looked_at(segments, flipped) == (Verdict.BAD, "digest")
    assert looked_at(segments, blank) == (Verdict.BAD, BLANK)
    assert looked_at(segments, killed) == GONE, "a dead header says nothing, damaged or not"
    assert looked_at(segments, spoilt) == DAMAGED
    assert looked_at(segments, msgspec.structs.replace(well, page=PAGES[-1])) == DAMAGED
    (data,) = segments.folder.glob("*.data")
    os.truncate(data, flipped.offset + flipped.nbytes - 1)
    assert looked_at(segments, flipped) == (Verdict.BAD, "truncated")


def test_an_object_whose_data_file_is_gone_is_missing_if_it_lives_and_a_listing_agrees(
    segments: SegmentObjects,
) -> None:
    well, killed, *_ = objects_in(segments)
    kill(segments, killed)
    (data,) = segments.folder.glob("*.data")
    for code in (errno.ENOENT, errno.ESTALE, errno.EIO):
        with failing("open", code, ".data"), pytest.raises(OSError, match=os.strerror(code)):
            looked_at(segments, well)
    data.unlink()
    with failing("open", errno.EIO, ".data"), pytest.raises(OSError, match=os.strerror(errno.EIO)):
        looked_at(segments, well)
    assert looked_at(segments, well) == (Verdict.BAD, MISSING)
    assert looked_at(segments, killed) == GONE
    (head,) = segments.folder.glob("*.head")
    head.unlink()
    assert looked_at(segments, well) == GONE


@pytest.mark.parametrize("change", ["flip", "remove"])
def test_an_object_that_is_evicted_between_two_looks_is_gone(
    segments: SegmentObjects, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    each = objects_in(segments)[1]
    (data,) = segments.folder.glob("*.data")
    real, opened = os.open, []

    def late(path, flags, *rest, **options):
        if os.fspath(path) == os.fspath(data) and not opened:
            opened.append(path)
            kill(segments, each)
            write(segments, ".data", each.offset, b"\x01\xfe") if change == "flip" else data.unlink()
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", late)
    assert looked_at(segments, each) == GONE
    assert opened


@pytest.mark.parametrize("of_a_read", [1, 2, 5], ids=lambda count: f"{count} objects of a read")
def test_the_objects_of_a_segment_that_differ_from_their_digests_are_suspects(
    segments: SegmentObjects, monkeypatch: pytest.MonkeyPatch, of_a_read: int
) -> None:
    found = objects_in(segments)
    (name,) = segments.catalog.segments
    monkeypatch.setattr(reading, "_READ_BYTES", of_a_read * found[0].held_bytes)
    fetched: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, offset, nbytes, _advice: fetched.append((offset, nbytes)))
    assert list(suspects(segments.catalog, name, found[::-1])) == [(each, False) for each in found]
    groups = [found[first : first + of_a_read] for first in range(0, 5, of_a_read)]
    spans = [(few[0].offset, few[-1].offset + few[-1].nbytes - few[0].offset) for few in groups]
    assert fetched == spans[1:], "each read but the first is announced while the one before is checked"
    write(segments, ".data", found[2].offset + found[2].nbytes - 1, b"\x5b")
    assert [bad for _, bad in suspects(segments.catalog, name, found)] == [False, False, True, False, False]
    (data,) = segments.folder.glob("*.data")
    os.truncate(data, found[4].offset + found[4].nbytes - 1)
    assert [bad for _, bad in suspects(segments.catalog, name, found)] == [False, False, True, False, True]


def test_a_read_that_fails_makes_suspects_of_its_objects_alone(
    segments: SegmentObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, real = objects_in(segments), os.preadv
    (name,) = segments.catalog.segments
    monkeypatch.setattr(reading, "_READ_BYTES", 2 * found[0].held_bytes)

    def failing(fd, views, offset):
        if offset == found[2].offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert [bad for _, bad in suspects(segments.catalog, name, found)] == [False, False, True, True, False]
    assert [bad for _, bad in suspects(segments.catalog, "of-another", found)] == [True] * 5


def test_bytes_of_the_read_before_pass_for_none_of_this_one(
    segments: SegmentObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pages of equal bytes, one read each: the second read ends early, and the first one's bytes lie there."""
    found = objects_in(segments)
    (name,) = segments.catalog.segments
    monkeypatch.setattr(reading, "_READ_BYTES", found[0].held_bytes)
    digests = segments.catalog.digests(found)
    (data,) = segments.folder.glob("*.data")
    write(segments, ".data", found[4].offset, data.read_bytes()[found[3].offset :][: found[3].nbytes])
    monkeypatch.setattr(segments.catalog, "digests", lambda _: [*digests[:4], digests[3]])
    assert not any(bad for _, bad in suspects(segments.catalog, name, found))
    os.truncate(data, found[4].offset + found[4].nbytes - 1)
    assert [bad for _, bad in suspects(segments.catalog, name, found)] == [False] * 4 + [True]


def test_a_page_is_read_from_objects_of_unlike_sizes(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        for heads in (Span(0, 3), Span(3, 5)):
            box = PageBox(heads, WHOLE.box.layers, WHOLE.box.tokens)
            assert all(r.ok for r in Rank(store, PagePart(GQA, box)).put(PAGES))
        assert [result.outcome for result in Rank(store, WHOLE).get(PAGES)] == [Got.READ] * 5
        first = PagePart(GQA, PageBox(Span(0, 3), WHOLE.box.layers, WHOLE.box.tokens))
        assert Rank(store, first).get(PAGES[:1])[0].ok, "one object of one size"


@pytest.mark.parametrize("rank", range(4))
def test_single_tokens_of_some_heads_are_read(tmp_path: Path, rank: int) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        Rank(store, WHOLE).put(PAGES)
        reader = Fleet(tp=2, cp=2, page_tokens=PAGE, cp_order=CpOrder.TOKEN)
        assert [result.outcome for result in Rank.of(store, GQA, reader, rank).get(PAGES)] == [Got.READ] * 5


@pytest.mark.parametrize("rank", [0, 1])
def test_single_tokens_come_from_cells_that_are_whole_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A reader of every other token."""
    with PageStore.open(tmp_path, SPACE) as store:
        Rank(store, WHOLE).put(PAGES)
        store.flush()
        segments, reader = segments_of(store), Fleet(cp=2, page_tokens=PAGE, cp_order=CpOrder.TOKEN)
        door = Rank.of(store, GQA, reader, rank)
        assert [result.outcome for result in door.get(PAGES)] == [Got.READ] * 5
        reasons: list[str] = []
        judge = segments.judge
        monkeypatch.setattr(segments, "judge", lambda failure: (reasons.append(failure.reason), judge(failure))[1])
        found = objects_in(segments)
        write(segments, ".data", found[3].offset + found[3].nbytes - 1, b"\x5b")
        (data,) = segments.folder.glob("*.data")
        os.truncate(data, found[4].offset + found[4].nbytes - 1)
        assert [result.outcome for result in door.get(PAGES)] == [*[Got.READ] * 3, *[Got.POISONED] * 2]
        assert reasons == [DIGEST, f"{SHORT} {found[4].nbytes - 1} of {found[4].nbytes} bytes"]
