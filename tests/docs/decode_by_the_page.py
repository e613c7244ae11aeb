"""Decoders written from docs/protocol.md and docs/object-format.md alone: struct, and nothing of kvmover's."""

from __future__ import annotations

import struct
from math import gcd
from typing import Any

# docs/protocol.md, "Framing". MessagePack's own types: https://github.com/msgpack/msgpack/blob/master/spec.md

_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LENGTHS = {0xC4: "B", 0xC5: "H", 0xC6: "I", 0xD9: "B", 0xDA: "H", 0xDB: "I"}
_LENGTHS |= {0xDC: "H", 0xDD: "I", 0xDE: "H", 0xDF: "I"}


def messages(note: bytes) -> list[dict[str, Any]]:
    """The maps of a note that is not sealed. Fields that were left out are left out."""
    assert note[:4] == b"kvm\x01", "a note of this framing"
    value, end = unpack(note, 4)
    assert end == len(note), "one map or one array of them, and nothing behind it"
    return value if isinstance(value, list) else [value]


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value, and where the next one begins."""
    kind = data[at]
    at += 1
    if kind < 0x80 or kind >= 0xE0:
        return (kind if kind < 0x80 else kind - 256), at
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
    if kind in _NUMBERS:
        size = struct.calcsize(_NUMBERS[kind])
        return struct.unpack(_NUMBERS[kind], data[at : at + size])[0], at + size
    if kind in _LENGTHS:
        size = struct.calcsize(_LENGTHS[kind])
        (length,) = struct.unpack(">" + _LENGTHS[kind], data[at : at + size])
        at += size
    else:
        length = kind & (0x1F if 0xA0 <= kind < 0xC0 else 0x0F)
    if kind in (0xC4, 0xC5, 0xC6):
        return data[at : at + length], at + length
    if 0xA0 <= kind < 0xC0 or kind in (0xD9, 0xDA, 0xDB):
        return data[at : at + length].decode(), at + length
    items: list[Any] = []
    mapped = 0x80 <= kind < 0x90 or kind in (0xDE, 0xDF)
    for _ in range(length * (2 if mapped else 1)):
        item, at = unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if mapped else items), at


def ids(table: bytes) -> list[int]:
    """A page table."""
    return list(struct.unpack(f"<{len(table) // 4}i", table))


# docs/object-format.md. XXH3 comes from xxhash and SHA-256 from hashlib: the page names them, and defines neither.


def xxh3(data: bytes, seed: int = 0) -> int:
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(data, seed)


def name(model: str, weights: str, page_tokens: int, salt: str = "", **component: object) -> bytes:
    """The digest of a namespace, or of one of its components."""
    from hashlib import sha256

    fields: list[tuple[str, object]] = [("model", model), ("weights", weights), ("page_tokens", page_tokens)]
    fields += [("salt", salt), ("order", "page head layer kv token dim")]
    fields += [
        (key, component[key]) for key in ("name", "layers", "kv", "heads", "dim", "dtype", "states") if component
    ]
    fields += [("row_tokens", tokens) for tokens in (component.get("row_tokens", 1),) if tokens != 1]
    texts = (str(text).encode() for field in fields for text in field)
    return sha256(b"kvmover-store-v1" + b"".join(struct.pack("<Q", len(text)) + text for text in texts)).digest()


def preamble(head: bytes) -> tuple[bytes, bytes]:
    """(namespace digest, boot id) of a head file."""
    magic, version, size, namespace, boot, zero, check = struct.unpack_from("<8sII32s16sQQ", head)
    assert (magic, version, size, zero) == (b"KVMOVER1", 1, 80, 0)
    assert check == xxh3(head[:72])
    return namespace, boot


def records(head: bytes) -> list[dict[str, Any]]:
    """Every whole record of a head file, in order."""
    at, found = 80, list[dict[str, Any]]()
    while at + 144 <= len(head):
        magic, size, state, stamp, check = struct.unpack_from("<4sI4sIQ", head, at)
        if magic != b"KVRC" or at + size > len(head) or check != xxh3(head[at + 24 : at + size], at):
            break
        kind, cells, offset, nbytes, page, component, *box = struct.unpack_from("<IIQQ32s32s8I", head, at + 24)
        digests = struct.unpack_from(f"<{cells}Q", head, at + 144)
        found.append(
            {
                "live": state == b"LIVE",
                "stamp": stamp,
                "kind": {1: "object", 2: "synced", 3: "sealed"}[kind],
                "offset": offset,
                "bytes": nbytes,
                "page": page,
                "component": component,
                "heads": range(box[0], box[0] + box[1]),
                "layers": range(box[2], box[2] + box[3]),
                "tokens": [box[4] + run * box[6] + i for run in range(box[5]) for i in range(box[7])],
                "digests": digests,
            }
        )
        at += size
    return found


def cells(data: bytes, record: dict[str, Any]) -> dict[tuple[int, int], bytes]:
    """The checked cells of an object, by head and layer."""
    size = record["bytes"] // len(record["digests"])
    places = [(head, layer) for head in record["heads"] for layer in record["layers"]]
    found = {at: data[record["offset"] + n * size :][:size] for n, at in enumerate(places)}
    assert [xxh3(cell) for cell in found.values()] == list(record["digests"])
    return found


def deleted(news: bytes) -> list[tuple[str, int]]:
    """(segment, offset of the record) of each row of `deleted.news`."""
    rows = [news[at : at + 48] for at in range(0, len(news), 48)]
    assert all(struct.unpack("<25s7sQQ", row)[3] == xxh3(row[:40]) for row in rows)
    return [(row[:25].decode(), int.from_bytes(row[32:40], "little")) for row in rows]


# docs/protocol.md, "Legs" and "Replicas": token by token, where the code computes with progressions.


def held(at: tuple[int, int, int], fleet: Any, page: int, stop: int, shared: bool) -> list[int]:
    """Positions below the end of the last page, in the order in which the context-parallel rank holds them."""
    cp, parts, pages = at[1], fleet.cp if shared else 1, -(-stop // page)
    if parts > 1 and fleet.cp_order == "token":
        return [i for i in range(stop) if i % parts == cp]
    first, last = (cp % parts) * pages // parts, (cp % parts + 1) * pages // parts
    mine = range(first, last) if fleet.cp_order == "block" else range(cp % parts, pages, parts)
    return [i * page + token for i in mine for token in range(page)]


def copies(at: tuple[int, int, int], fleet: Any, heads: int, shared: bool) -> tuple[int, int, int]:
    """(number of the box, index of the copy, copies) of the rank at (pp, cp, tp)."""
    pp, cp, tp = at
    h, parts = min(heads, fleet.tp), fleet.cp if shared else 1
    columns = [other for other in range(fleet.tp) if other * h // fleet.tp == tp * h // fleet.tp]
    index = cp // parts * len(columns) + tp - columns[0]
    return pp * h + tp * h // fleet.tp, index, fleet.cp // parts * len(columns)


def part(extent: int, parts: int, r: int) -> set[int]:
    first = r * extent // parts
    return set(range(first, first + max(1, (r + 1) * extent // parts - first)))


def sent(ranks: tuple[int, int], fleets: tuple[Any, Any], component: Any, wanted: range, replicas: str) -> list[int]:
    """Positions that the rank of the first fleet sends to the rank of the second."""
    src, dst = fleets
    n, m = (coordinates(rank, fleet) for rank, fleet in zip(ranks, fleets, strict=True))
    shared, heads = not component.states, component.heads
    size = src.page_tokens if shared else 1
    mine = held(n, src, size, wanted.stop, shared)
    both = common(n, m, fleets, component, wanted)
    _, i, s = copies(n, src, heads, shared)
    box, j, d = copies(m, dst, heads, shared)
    if s == 1 or not both:
        return both
    if replicas == "elect":
        order = sorted(range(dst.size), key=lambda rank: coordinates(rank, dst))
        takers = [rank for rank in order if common(n, coordinates(rank, dst), fleets, component, wanted)]
        return both if takers.index(ranks[1]) % s == i else []
    a, b = s // gcd(s, d), d // gcd(s, d)
    if i // a != j // b:
        return []
    writer, turn = (i - box) % a, j % b
    gaps = [k for k in range(1, len(mine)) if mine[k] != mine[k - 1] + 1]
    width = gaps[0] if gaps else size
    pages = [mine[k : k + width] for k in range(0, len(mine), width)]
    kept = [[token for token in page if token in wanted] for page in pages]
    full = [page for page in kept if len(page) == width]
    cut = sorted((page for page in kept if 0 < len(page) < width), key=lambda page: -len(page))
    chosen = [page for k, page in enumerate(full) if (turn * len(full) + k) % a == writer]
    chosen += [page for k, page in enumerate(cut, len(full)) if (b * k + turn) % a == writer]
    return sorted(set(both).intersection(token for page in chosen for token in page))


def coordinates(rank: int, fleet: Any) -> tuple[int, int, int]:
    """(pp, cp, tp): `rank = (pp * CP + cp) * TP + tp`."""
    return rank // (fleet.tp * fleet.cp), rank // fleet.tp % fleet.cp, rank % fleet.tp


def common(
    n: tuple[int, int, int], m: tuple[int, int, int], fleets: tuple[Any, Any], component: Any, wanted: range
) -> list[int]:
    """Wanted positions that two ranks hold, if their layers and heads meet."""
    src, dst = fleets
    layers = part(component.layers, src.pp, n[0]) & part(component.layers, dst.pp, m[0])
    if not layers or not part(component.heads, src.tp, n[2]) & part(component.heads, dst.tp, m[2]):
        return []
    shared = not component.states
    here, there = (
        set(held(at, fleet, fleet.page_tokens if shared else 1, wanted.stop, shared))
        for at, fleet in ((n, src), (m, dst))
    )
    return sorted(here & there & set(wanted))
