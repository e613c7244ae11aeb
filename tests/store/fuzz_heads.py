"""Coverage-guided fuzzing of head files, outside the test run: `PYTHONPATH=. python tests/store/fuzz_heads.py SECONDS`.

Mutants of real head files are opened as a store would open them. Those that reach new lines of the reader are kept and
mutated further. Whatever comes out of a mutant must have been written, byte for byte but for state and stamp.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from store_rank import GQA, MLA, PAGE, SPACE, Rank, pages_of

from kvmover.store import PagePart, PageStore
from kvmover.store.head import next_record
from kvmover.store.record import PREAMBLE_BYTES, STATE_AT, decode_all
from kvmover.store.segment import DATA, HEAD

WATCHED = ("record.py", "head.py", "segment.py", "segment_catalog.py")


class Lines:
    """Which lines of the reader a call ran through."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> Lines | None:
        name = Path(frame.f_code.co_filename).name
        if name not in WATCHED:
            return None
        if event == "line":
            self.seen.add((name, frame.f_lineno))
        return self


def written(root: Path) -> tuple[bytes, bytes]:
    """A head file with objects, marks and deletions in it, and its data."""
    with PageStore.open(root, SPACE) as store:
        for component in (GQA, MLA):
            Rank(store, PagePart.whole(component, PAGE)).put(pages_of(4))
            store.flush()
        store.evict(20000)
    (head,), (data,) = ((list(root.glob(f"*/*{suffix}"))) for suffix in (HEAD, DATA))
    return head.read_bytes(), data.read_bytes()


def mutated(head: bytes, chance: random.Random) -> bytes:
    raw = bytearray(head)
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(raw) + 1), chance.choice((1, 1, 4, 8, 64, 176))
        what = chance.randrange(6)
        if what == 0 and at < len(raw):
            raw[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            raw[at : at + length] = chance.randbytes(length)
        elif what == 2:
            del raw[at:]
        elif what == 3:
            del raw[at : at + length]
        elif what == 4:
            source = chance.randrange(len(raw) + 1)
            raw[at:at] = raw[source : source + length]
        else:
            raw[at : at + length] = bytes(length)
    return bytes(raw)


def records(head: bytes) -> set[tuple[int, bytes]]:
    """Place and fixed bytes of every whole record, found as after damage."""
    found: set[tuple[int, bytes]] = set()
    at: int | None = PREAMBLE_BYTES
    with tempfile.TemporaryFile() as file:
        file.write(head)
        file.flush()
        while at is not None:
            for record in decode_all(head[at:], at):
                raw = head[record.at : record.at + record.record_bytes]
                found.add((record.at, raw[:STATE_AT] + raw[STATE_AT + 8 :]))
                at = record.at + record.record_bytes - 1
            at = next_record(file.fileno(), at, len(head))
    return found


def main(seconds: float, seed: int) -> None:
    chance, lines, deadline = random.Random(seed), Lines(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        head, data = written(Path(scratch))
    truth, corpus, count = records(head), [head], 0
    while time.monotonic() < deadline:
        mutant = mutated(chance.choice(corpus), chance)
        assert records(mutant) <= truth, "a record that nobody wrote"
        before = len(lines.seen)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / SPACE.folder
            folder.mkdir()
            (folder / ("0" * 16 + "-00000000" + HEAD)).write_bytes(mutant)
            (folder / ("0" * 16 + "-00000000" + DATA)).write_bytes(data)
            sys.settrace(lines)
            store = PageStore.open(Path(scratch), SPACE)
            sys.settrace(None)
            for component in (GQA, MLA):
                rank, pages = Rank(store, PagePart.whole(component, PAGE)), pages_of(4)
                there = rank.exists(pages)
                assert [answer.ok for answer in rank.get(pages)] == there, "a false hit"
            store.close()
        if len(lines.seen) > before:
            corpus.append(mutant)
        count += 1
    sys.stdout.write(f"{count} mutants, {len(lines.seen)} lines, {len(corpus)} kept\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
