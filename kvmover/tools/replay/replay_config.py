"""ReplayConfig describes the cache that a trace is replayed against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvmover.cache.prefix import LRU, POLICIES, DeviceOnly, EvictionPolicy, Tiers, WriteBack, WriteThrough
from kvmover.errors import KvmoverError


class ReplayConfigError(KvmoverError, ValueError):
    """An impossible cache: the message names the option and the value."""


#: Times of writes to the host, by SGLang's names. Write-back loses no hits, however small the host is. Write-through
#: copies pages that stay on the device, and a host smaller than the device has no room for others.
WRITE_POLICIES: dict[str, WriteBack | WriteThrough] = {
    "write_back": WriteBack(),
    "write_through": WriteThrough(),
    "write_through_selective": WriteThrough(2),
}


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Page size, policy, and each tier's tokens. A device of None is unlimited; a tier of 0 tokens is absent.

    Pages reach storage through the host, as in engines, so storage without a host tier is refused. `writes`: the time
    of writes to the host, and with it to storage. Raises ReplayConfigError for a tier below one page, or storage
    without a host.
    """

    page_tokens: int = 64
    device_tokens: int | None = None
    host_tokens: int = 0
    storage_tokens: int = 0
    policy: EvictionPolicy = LRU
    writes: WriteBack | WriteThrough = WRITE_POLICIES["write_back"]

    def __post_init__(self) -> None:
        for name, tokens in (
            ("device", self.device_tokens),
            ("host", self.host_tokens),
            ("storage", self.storage_tokens),
        ):
            if tokens and tokens < self.page_tokens:
                raise ReplayConfigError(f"a {name} of {tokens} tokens holds no page of {self.page_tokens}")
        if self.storage_tokens and not self.host_tokens:
            raise ReplayConfigError(
                f"storage of {self.storage_tokens} tokens is reached through a host tier: give it tokens too"
            )

    @property
    def tiers(self) -> Tiers:
        """Returns the tree's tiers: the device alone without host tokens."""
        return self.writes if self.host_tokens else DeviceOnly()

    def pages(self, tokens: int) -> int:
        """Returns the whole pages in `tokens` tokens."""
        return tokens // self.page_tokens

    def as_data(self) -> dict[str, Any]:
        """Returns names and numbers, for JSON."""
        return {
            "page_tokens": self.page_tokens,
            "capacity_tokens": self.device_tokens,
            "host_tokens": self.host_tokens,
            "storage_tokens": self.storage_tokens,
            "policy": self.policy.name,
            "write_policy": next(name for name, writes in WRITE_POLICIES.items() if writes == self.writes),
        }


def write_policy_named(name: str) -> WriteBack | WriteThrough:
    """Returns a write policy by name. Raises ReplayConfigError with all names."""
    if name not in WRITE_POLICIES:
        raise ReplayConfigError(f"no write policy {name}: there are {', '.join(WRITE_POLICIES)}")
    return WRITE_POLICIES[name]


def policy_named(name: str) -> EvictionPolicy:
    """Returns an eviction policy by name. Raises ReplayConfigError with all names."""
    if name not in POLICIES:
        raise ReplayConfigError(f"no policy {name}: there are {', '.join(POLICIES)}")
    return POLICIES[name]
