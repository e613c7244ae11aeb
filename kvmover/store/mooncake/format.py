"""A pool's format: its location, its keys, and bytes of objects (header, digests) and of entries of lists. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import parse_qsl, urlsplit

from xxhash import xxh3_64_digest, xxh3_128_digest

from kvmover.errors import StoreError
from kvmover.store.part import PartKey
from kvmover.store.record import (
    DIGEST_BYTES,
    FIXED_BYTES,
    Kind,
    Record,
    decode,
    decode_part,
    encode_object,
    encode_part,
)

#: What stands before every key of ours where the location names nothing else: others may use the same pool.
_PREFIX = "kvmover"

#: How members of a pool find each other without a service for it.
_HANDSHAKE = "P2PHANDSHAKE"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where the pool's master listens, and how this process takes part.

    `prefix` begins every key. `donate_bytes` of this process's memory join the pool while it lives. `metadata` and
    `protocol` are Mooncake's own, and must be the same for all members.
    """

    host: str
    port: int
    prefix: str = _PREFIX
    donate_bytes: int = 0
    metadata: str = _HANDSHAKE
    protocol: str = "tcp"

    @classmethod
    def parse(cls, location: str) -> PoolAddress:
        """Raises StoreError for what is no location of a pool.

        >>> PoolAddress.parse("mooncake://10.0.0.1:50051/chat?donate=8GiB").donate_bytes >> 30
        8
        """
        try:
            parts = urlsplit(location)
            host, port = parts.hostname, parts.port
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            donate_bytes = _bytes_in(options.pop("donate", "0"))
        except ValueError as error:
            raise _refused(location, str(error)) from error
        if not host or not port:
            raise _refused(location, "it names no host and port of a master")
        prefix = parts.path.strip("/") or _PREFIX
        if not re.fullmatch(r"[\w./-]+", prefix, re.ASCII) or parts.fragment:
            raise _refused(location, "a prefix is of letters, digits and ./_-")
        found = cls(host, port, prefix, donate_bytes, **_words(location, options))
        if found.protocol not in ("tcp", "rdma"):
            raise _refused(location, f"protocol={found.protocol} is neither tcp nor rdma")
        return found

    def without_gift(self) -> PoolAddress:
        """The same, for who gives no memory."""
        return replace(self, donate_bytes=0)

    @property
    def master(self) -> str:
        """As Mooncake writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def location(self) -> str:
        """Without what this process gives: where the pages are, for people and for tools that only look."""
        options = {"metadata": (self.metadata, _HANDSHAKE), "protocol": (self.protocol, "tcp")}
        said = "&".join(f"{name}={value}" for name, (value, usual) in options.items() if value != usual)
        return f"mooncake://{self.master}/{self.prefix}" + (f"?{said}" if said else "")


def _words(location: str, options: dict[str, str]) -> dict[str, str]:
    if unknown := sorted(options.keys() - {"metadata", "protocol"}):
        raise _refused(location, f"unknown option {unknown[0]}; there are donate, metadata and protocol")
    return options


def _bytes_in(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMGT]iB)?", text, re.ASCII)
    if not found:
        raise ValueError(f"donate={text} is no number of bytes, as 8GiB")
    return int(found[1]) * _UNITS[found[2] or ""]


def _refused(location: str, reason: str) -> StoreError:
    return StoreError(f"cannot use {location}: {reason}; a pool is mooncake://HOST:PORT[/prefix][?donate=8GiB]")


#: Payloads begin at multiples of this in their objects.
_ALIGNED = 64

#: A short list has at most so many entries.
ENTRIES = 256


@lru_cache(maxsize=4096)
def part_name(part: PartKey) -> str:
    """What stands for component and box in keys: 16 hexadecimal digits. The header says both in full."""
    return xxh3_128_digest(encode_part(part))[:8].hex()


def object_key(folder: str, page: bytes, part: PartKey) -> str:
    """`folder/page/box`: no rank and no machine is in it."""
    return f"{folder}/{page.hex()}/{part_name(part)}"


def header_bytes(cells: int) -> int:
    """Bytes before the payload of an object of so many cells.

    >>> header_bytes(32), header_bytes(1)
    (448, 192)
    """
    return -(-(FIXED_BYTES + cells * DIGEST_BYTES) // _ALIGNED) * _ALIGNED


def encode_header(page: bytes, part: PartKey, nbytes: int, stamp: int, digests: bytes) -> bytes:
    """The header of an object with `nbytes` bytes of payload: a record at byte 0, padded with zeros."""
    size = header_bytes(part.box.cells)
    return encode_object(0, stamp, (size, nbytes), page, part, digests).ljust(size, b"\0")


def decode_header(raw: bytes, page: bytes, part: PartKey) -> Record | None:
    """The record that an object begins with; None for a damaged one, or one of another page, component or box."""
    record = decode(raw, 0)
    if record is None or record.kind is not Kind.OBJECT or record.offset != header_bytes(part.box.cells):
        return None
    return record if record.page == page and record.part is part else None


def entry_key(name: str, number: int) -> str:
    """Of entry `number` of a list."""
    return f"{name}/{number:02x}"


def encode_box(part: PartKey) -> bytes:
    """An entry of the list of boxes: component and box as a record has them, and their XXH3."""
    raw = encode_part(part)
    return raw + xxh3_64_digest(raw)


def decode_box(entry: bytes) -> PartKey | None:
    """None for a damaged entry."""
    raw = entry[:-8]
    if len(raw) != FIXED_BYTES - 80 or xxh3_64_digest(raw) != entry[-8:]:
        return None
    return decode_part(raw)
