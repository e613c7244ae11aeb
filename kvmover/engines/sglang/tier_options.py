"""SGLang's flags for a hierarchical cache become a tree's tiers, a policy and a number of host pages here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmover.cache.prefix import Tiers, WriteBack, WriteThrough
from kvmover.cache.tiers import BestEffort, Prefetch, Store, TierPolicy, Timeout, Wait
from kvmover.engines.common import EngineUnsupported

#: What `--hicache-storage-backend dynamic` has to name.
_STORE = "KvmoverStore"


@dataclass(frozen=True, slots=True)
class StorageFlags:
    """`--hicache-storage-backend` and its options: SGLang's own by name, all others in `options`."""

    backend: str
    options: Mapping[str, Any]
    least_tokens: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25

    def check(self) -> None:
        """Raise EngineUnsupported unless pages are to be kept in kvmover's page store."""
        if self.backend != "dynamic" or self.options.get("class_name") != _STORE:
            named = f"{self.backend} with class_name {self.options.get('class_name')}"
            raise EngineUnsupported(
                f"kvmover's radix cache keeps pages in kvmover's page store: --hicache-storage-backend dynamic with"
                f" class_name {_STORE}, not {named}"
            )


@dataclass(frozen=True, slots=True)
class TierFlags:
    """`--hicache-ratio`, `--hicache-size` in bytes or 0, `--hicache-write-policy`, `--hicache-storage-prefetch-policy`,
    and the storage, if any. `host_memory`: `--hicache-host-memory-mode`.
    """

    ratio: float
    host_bytes: int = 0
    write: str = "write_through"
    prefetch: str = "timeout"
    host_memory: str = "cache"
    storage: StorageFlags | None = field(default=None)

    def tiers(self) -> Tiers:
        """When pages are copied to the host. Raises EngineUnsupported for a policy of another name."""
        known: dict[str, Tiers] = {
            "write_through": WriteThrough(1),
            "write_through_selective": WriteThrough(2),
            "write_back": WriteBack(),
        }
        if self.write not in known:
            raise EngineUnsupported(f"pages are written by {', '.join(known)}, not by {self.write}")
        return known[self.write]

    def policy(self) -> TierPolicy:
        """What storage is written and read for. Raises EngineUnsupported for a prefetch of another name."""
        if self.storage is None:
            return TierPolicy(store=Store.NEVER)
        storage = self.storage
        known: dict[str, Prefetch] = {
            "best_effort": BestEffort(),
            "wait_complete": Wait(),
            "timeout": Timeout(storage.timeout_s, storage.timeout_per_ki_token_s),
        }
        if self.prefetch not in known:
            raise EngineUnsupported(f"storage is read by {', '.join(known)}, not by {self.prefetch}")
        return TierPolicy(prefetch=known[self.prefetch], least_tokens=storage.least_tokens)

    def host_pages(self, device_pages: int, page_bytes: int) -> int:
        """Pages of the host: as many as fit `host_bytes`, or `ratio` times those of the device.

        Raises EngineUnsupported where that is none.

        >>> TierFlags(ratio=2.0).host_pages(1000, 4096), TierFlags(2.0, host_bytes=10**9).host_pages(1000, 4096)
        (2000, 244140)
        """
        pages = self.host_bytes // page_bytes if self.host_bytes else int(device_pages * self.ratio)
        if pages < 1:
            raise EngineUnsupported(
                f"the host holds no page of {page_bytes} bytes: --hicache-size {self.host_bytes} bytes,"
                f" --hicache-ratio {self.ratio} of {device_pages} pages"
            )
        return pages
