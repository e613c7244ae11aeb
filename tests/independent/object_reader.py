"""A reader of page stores in directories, written from docs/object-format.md alone: XXH3 comes from xxhash."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from uuid import UUID

from xxhash import xxh3_64_intdigest as xxh3


@dataclass(frozen=True, slots=True)
class Record:
    """An object or a mark that begins at byte `at` of a head. `cells`: head and layer of each cell."""

    at: int
    kind: str
    is_live: bool
    offset: int
    nbytes: int
    page: bytes
    component: bytes
    cells: list[tuple[int, int]]
    tokens: list[int]
    digests: tuple[int, ...]


def records(head: bytes) -> Iterator[Record]:
    """Whole records in order. Bytes that are none are passed over."""
    at = 80
    while 0 <= at <= len(head) - 144:
        magic, size, state, _, check, kind, count = struct.unpack_from("<4sI4sIQII", head, at)
        offset, nbytes, page, component, *box = struct.unpack_from("<QQ32s32s8I", head, at + 32)
        fits = kind in (1, 2, 3) and (kind == 1) == (count > 0) and size == 144 + 8 * count
        fits = fits and count == (box[1] * box[3] if kind == 1 else 0)
        if magic == b"KVRC" and fits and at + size <= len(head) and check == xxh3(head[at + 24 : at + size], at):
            name = {1: "object", 2: "synced", 3: "sealed"}[kind]
            cells = list(product(range(box[0], box[0] + box[1]), range(box[2], box[2] + box[3])))
            tokens = [box[4] + number * box[6] + i for number in range(box[5]) for i in range(box[7])]
            digests = struct.unpack_from(f"<{count}Q", head, at + 144)
            yield Record(at, name, state == b"LIVE", offset, nbytes, page, component, cells, tokens, digests)
            at += size
        else:
            at = head.find(b"KVRC", at + 1)


def deleted(news: bytes) -> list[tuple[str, int]]:
    """Segment and byte of its head of each record that `deleted.news` names."""
    rows = [news[at : at + 48] for at in range(0, len(news) - 47, 48)]
    whole = [row for row in rows if xxh3(row[:40]) == int.from_bytes(row[40:], "little")]
    return [(row[:25].decode(), int.from_bytes(row[32:40], "little")) for row in whole]


class Reader:
    """The pages of one namespace, by what a machine with this boot id may believe."""

    def __init__(self, root: Path, model: str, weights: str, page_tokens: int, salt: str, boot: UUID) -> None:
        self._fields = [("model", model), ("weights", weights), ("page_tokens", page_tokens), ("salt", salt)]
        self._fields += [("order", "page head layer kv token dim")]
        self.digest, self._boot = self._digest_with(), boot.bytes
        self.folder = root / self.digest[:16].hex()

    def _digest_with(self, *more: tuple[str, object]) -> bytes:
        texts = [str(text).encode() for field in [*self._fields, *more] for text in field]
        whole = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
        return hashlib.sha256(b"kvmover-store-v1" + whole).digest()

    def believed(self, head: Path) -> list[Record]:
        """The live objects of a segment, of which every cell is still to be compared."""
        text, data = head.read_bytes(), head.with_suffix(".data")
        if len(text) < 80 or not data.exists():
            return []
        *first, boot, _, check = struct.unpack_from("<8sII32s16sQQ", text)
        is_whole, found = check == xxh3(text[:72]), list(records(text))
        if is_whole and first != [b"KVMOVER1", 1, 80, self.digest]:
            return []
        end, synced = data.stat().st_size, max((r.offset for r in found if r.kind == "synced"), default=0)
        end = end if is_whole and boot == self._boot else min(end, synced)
        return [r for r in found if r.kind == "object" and r.is_live and r.offset + r.nbytes <= end]

    def rows(self, component: dict, page: bytes) -> dict[tuple[int, int, int, int], bytes]:
        """The rows of a page that are there, by head, layer, kv and token: those of cells that equal their digests."""
        said = [(key, component[key]) for key in ("name", "layers", "kv", "heads", "dim", "dtype", "states")]
        said += [("row_tokens", tokens) for tokens in [component.get("row_tokens", 1)] if tokens > 1]
        wanted, found = (page, self._digest_with(*said)), dict[tuple[int, int, int, int], bytes]()
        for head in sorted(self.folder.glob("*.head")):
            for record in (r for r in self.believed(head) if (r.page, r.component) == wanted):
                with head.with_suffix(".data").open("rb") as data:
                    data.seek(record.offset)
                    cells = [data.read(record.nbytes // len(record.cells)) for _ in record.cells]
                places = list(product(range(component["kv"]), record.tokens))
                size = len(cells[0]) // len(places)
                for at, cell, digest in zip(record.cells, cells, record.digests, strict=True):
                    if xxh3(cell) == digest:
                        found |= {(*at, *place): cell[n * size : (n + 1) * size] for n, place in enumerate(places)}
        return found
