"""No trouble of a disk breaks the promise of a flush, but that the medium loses a page, which is then missed and never
read as another: every single trouble, and pairs of them on different pages.

`python -m perf.storage_faults`, the end of `make night`, tries every pair.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmover.store import segment_writer, takeover
from kvmover.store.segment import Segment
from kvmover.store.segment_writer import Writer
from tests.proofs import family, tries
from tests.store.faulty_disk import PLACES, TROUBLES, FaultyDisk, Trouble
from tests.store.flush_stories import STORIES, A, hit_pages, on_other_pages, singles, told


@pytest.mark.searched
@pytest.mark.parametrize(
    ("story", "segment_pages"), family([(story, n) for n in (1, 2) for story in STORIES], few=[(s, 1) for s in STORIES])
)
def test_no_single_trouble_of_a_disk_breaks_a_promise(story: str, segment_pages: int, tmp_path: Path) -> None:
    cases = singles(story, tmp_path / "story", segment_pages)
    for case in cases[:: tries(40, 6, 1)]:
        told(story, tmp_path / "story", dict([case]), segment_pages)


@pytest.mark.searched
@pytest.mark.parametrize("story", ["kept running", "died", "lost power"])
def test_no_two_troubles_on_different_pages_break_a_promise(story: str, tmp_path: Path) -> None:
    chance, folder = random.Random(story), tmp_path / "story"
    well = told(story, folder, {})
    firsts = [case for case in singles(story, folder) if on_other_pages(well, case)]
    for first in chance.choices(firsts, k=tries(3, 40, 400)):
        seconds = on_other_pages(told(story, folder, dict([first])), first)
        told(story, folder, dict([first, *chance.choices(seconds, k=bool(seconds))]))


def in_vain(*_: object, **__: object) -> None:
    """A step that is left out."""


#: Steps without which some story breaks a promise, no trouble needed.
LEFT_OUT: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "files are not synced": ("kept running", lambda patch: patch.setattr(segment_writer, "settle", in_vain)),
    "names are not": ("cleaned", lambda patch: patch.setattr(segment_writer, "sync_names", in_vain)),
    "a dead writer's segment is not": ("died", lambda patch: patch.setattr(Segment, "settle", in_vain)),
    "its name is not": ("died", lambda patch: patch.setattr(takeover, "sync_names", in_vain)),
    "pages are carried and not synced": ("cleaned", lambda patch: patch.setattr(Writer, "sync_own", in_vain)),
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_step_that_is_left_out_is_found_out(left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story, leave_out = LEFT_OUT[left_out]
    leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=r"lost at b'the same, later\.'"):
        told(story, tmp_path / "story", {})


@pytest.mark.parametrize("name", ["fsync", "fdatasync"])
def test_a_sync_that_fails_in_an_opening_or_a_takeover_is_made_up_for(name: str, tmp_path: Path) -> None:
    """The process that met the failure opened again; or found the page of a dead writer, and flushed."""
    for story in ("kept running", "died"):
        calls = told(story, tmp_path / "story", {}).disk.calls
        syncs = [at for at, call in enumerate(calls) if call.name == name]
        assert len(syncs) > 3
        for at in syncs:
            told(story, tmp_path / "story", {at: Trouble.EIO})


def test_a_page_that_the_medium_loses_is_missed_and_the_others_are_there(tmp_path: Path) -> None:
    """A wrong bit in the payload of one page, as it is written."""
    calls = told("kept running", tmp_path / "story", {}).disk.calls
    first = next(at for at, call in enumerate(calls) if call.name == "pwritev")
    tale = told("kept running", tmp_path / "story", {first: Trouble.ROT})
    assert hit_pages(tale) == {A}
    assert A in tale.promised


def test_every_call_below_a_store_has_its_troubles() -> None:
    """But those that have no effect, or that the files engine makes in no story."""
    assert {*PLACES} - {*TROUBLES} == {"close", "dup", "posix_fadvise", "fstatvfs"}


def test_a_power_cut_leaves_what_was_synced(tmp_path: Path) -> None:
    import os

    disk = FaultyDisk(tmp_path / "root", {})
    disk.root.mkdir()
    with disk.installed():
        folder = os.open(disk.root, os.O_RDONLY)
        for name in ("safe", "unsynced", "unnamed"):
            fd = os.open(disk.root / name, os.O_RDWR | os.O_CREAT)
            os.pwrite(fd, b"0123", 0)
            if name != "unsynced":
                os.fdatasync(fd)
            os.pwrite(fd, b"xy", 1)
            if name != "unnamed":
                os.fsync(folder)
            os.close(fd)
        os.close(folder)
    images = list(disk.images())
    assert images[0] == {"safe": b"0123", "unsynced": b""}
    assert images[-1] == {"safe": b"0xy3", "unsynced": b"0xy3", "unnamed": b"0xy3"}
    disk.power_cut()
    assert {path.name: path.read_bytes() for path in disk.root.iterdir()} == images[0]
