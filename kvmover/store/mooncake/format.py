"""The format of a pool: its location, its keys, and the bytes of object headers and list entries. Pure."""

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

#: Default prefix of every key, because other programs may share the pool.
_PREFIX = "kvmover"

#: Mooncake's metadata setting for members that find each other without a metadata service.
_HANDSHAKE = "P2PHANDSHAKE"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """The address of a pool's master, and this process's part in the pool.

    `prefix` begins every key. `donate_bytes`: memory lent to the pool while this process lives. `metadata`, `protocol`:
    Mooncake settings, equal for all members.
    """

    host: str
    port: int
    prefix: str = _PREFIX
    donate_bytes: int = 0
    metadata: str = _HANDSHAKE
    protocol: str = "tcp"

    @classmethod
    def parse(cls, location: str) -> PoolAddress:
        """Parse `mooncake://HOST:PORT[/prefix][?options]`. Raises StoreError for another form or an unknown option.

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
        """Return the address with `donate_bytes` 0."""
        return replace(self, donate_bytes=0)

    @property
    def master(self) -> str:
        """Master address in Mooncake's form, HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def location(self) -> str:
        """Location URL without `donate`, for people and for tools."""
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

#: Upper limit of entries in a short list.
ENTRIES = 256


@lru_cache(maxsize=4096)
def part_name(part: PartKey) -> str:
    """Return 16 hexadecimal digits that stand for component and box in keys; an object's header has both in full."""
    return xxh3_128_digest(encode_part(part))[:8].hex()


def object_key(folder: str, page: bytes, part: PartKey) -> str:
    """Return the key `folder/page/box`, which is independent of rank and machine."""
    return f"{folder}/{page.hex()}/{part_name(part)}"


def header_bytes(cells: int) -> int:
    """Return the bytes before the payload in an object of `cells` cells.

    >>> header_bytes(32), header_bytes(1)
    (448, 192)
    """
    return -(-(FIXED_BYTES + cells * DIGEST_BYTES) // _ALIGNED) * _ALIGNED


def encode_header(page: bytes, part: PartKey, nbytes: int, stamp: int, digests: bytes) -> bytes:
    """Encode the header of an object with `nbytes` of payload: a record at byte 0, zero-padded to `header_bytes`."""
    size = header_bytes(part.box.cells)
    return encode_object(0, stamp, (size, nbytes), page, part, digests).ljust(size, b"\0")


def decode_header(raw: bytes, page: bytes, part: PartKey) -> Record | None:
    """Decode the record at an object's start; None if damaged, or of another page, component or box."""
    record = decode(raw, 0)
    if record is None or record.kind is not Kind.OBJECT or record.offset != header_bytes(part.box.cells):
        return None
    return record if record.page == page and record.part is part else None


def entry_key(name: str, number: int) -> str:
    """Return the key of entry `number` of the list `name`."""
    return f"{name}/{number:02x}"


def encode_box(part: PartKey) -> bytes:
    """Encode an entry of the list of boxes: component and box as in a record, then their XXH3."""
    raw = encode_part(part)
    return raw + xxh3_64_digest(raw)


def decode_box(entry: bytes) -> PartKey | None:
    """Decode an entry of the list of boxes; None if damaged."""
    raw = entry[:-8]
    if len(raw) != FIXED_BYTES - 80 or xxh3_64_digest(raw) != entry[-8:]:
        return None
    return decode_part(raw)
