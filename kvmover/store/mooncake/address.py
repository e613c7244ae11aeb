"""A PoolAddress is what a location of a pool of memory says: `mooncake://HOST:PORT[/prefix][?donate=...]`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit

from kvmover.errors import StoreError

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
