"""A rank that opens a store beside others and says if it published its index; or it dies while it writes one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

from store_rank import MLA, PAGE, SPACE, pages_of

from kvmover.store import PagePart, PageStore, shared_index, snapshot_file

PAGES = 200


class Killed:
    """An XXH3 that ends the process with a part of the snapshot written."""

    def __init__(self) -> None:
        self.pieces = 0

    def update(self, _: object) -> None:
        self.pieces += 1
        if self.pieces > 9:
            os.kill(os.getpid(), signal.SIGKILL)


def copied_bytes() -> int:
    """The bytes of mapped snapshots of which this process has a copy of its own."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    found = [re.search(r"^Anonymous: +(\d+) kB", each, re.MULTILINE) for each in maps if ".snapshot" in each]
    return sum(int(each[1]) << 10 for each in found if each)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(role: str, root: Path, memory: Path) -> None:
    shared_index.WORTH_BYTES, shared_index.MEMORY = 0, memory
    if role == "dies":
        snapshot_file.xxh3_64 = Killed
    published: list[bytes] = []
    publish = snapshot_file.SnapshotTurn.publish

    def counted(turn: snapshot_file.SnapshotTurn, contents: bytes, columns):
        published.append(contents)
        return publish(turn, contents, columns)

    snapshot_file.SnapshotTurn.publish = counted
    say("ready")
    sys.stdin.readline()
    with PageStore.open(root, SPACE) as store:
        copied = copied_bytes()
        pages = sum(store.view(SPACE, PagePart.whole(MLA, PAGE)).exists(pages_of(PAGES)))
        say(json.dumps({"pages": pages, "published": len(published), "copied": copied}))
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
