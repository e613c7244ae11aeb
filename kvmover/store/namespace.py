"""A Namespace holds the fields that must be equal for two writers to share pages, and their digests."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

from kvmover.errors import StoreError
from kvmover.layout import PACKED_ORDER, Component

#: Bytes of a page's hash, and of the digests here.
HASH_BYTES = 32

_TAG = b"kvmover-store-v1"

#: Digested fields, named one by one so that a new field of Component does not orphan every store.
_OF_NAMESPACE = ("model", "weights", "page_tokens", "salt", "order")
_OF_COMPONENT = ("name", "layers", "kv", "heads", "dim", "dtype", "states")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A model, weights, page size, object order and tenant. Ranks differ only in their objects' boxes.

    `weights` names the revision: KV of other weights under the same name is other KV. `salt` separates tenants; it is
    never written down, only its digest is. One namespace is one quota, one order of eviction and one `clear`.

    If `weights` alone identify the weights, as a digest does, `model` is "" and `hint` is the name shown to people,
    which is no part of the namespace.
    """

    model: str
    weights: str
    page_tokens: int
    salt: str = field(default="", repr=False)
    order: str = PACKED_ORDER
    hint: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise StoreError(f"a page of {self.page_tokens} tokens; it needs at least 1")
        if self.order != PACKED_ORDER:
            raise StoreError(f"objects in order {self.order!r}; only {PACKED_ORDER!r} is written")

    @property
    def digest(self) -> bytes:
        """Returns the SHA-256 of all fields, 32 bytes, which names directories and head files."""
        return _digest(self, None)

    @property
    def folder(self) -> str:
        """Returns the name of the namespace's directory: 32 hexadecimal digits."""
        return self.digest[:16].hex()

    def digest_for(self, component: Component) -> bytes:
        """Returns the digest of namespace and byte-relevant fields of `component`, dtype too (sglang#33268)."""
        return _digest(self, component)


@lru_cache(maxsize=1024)
def _digest(namespace: Namespace, component: Component | None) -> bytes:
    """Returns the SHA-256 of length-prefixed names and values, so that "ab", "c" differs from "a", "bc"."""
    whole = sha256(_TAG)
    of_component = _OF_COMPONENT if component else ()
    if component and component.row_tokens > 1:  # objects of rows of one token keep their names
        of_component += ("row_tokens",)
    for value, names in ((namespace, _OF_NAMESPACE), (component, of_component)):
        for name in names:
            for text in (name, str(getattr(value, name))):
                encoded = text.encode("utf-8", "surrogatepass")
                whole.update(len(encoded).to_bytes(8, "little") + encoded)
    return whole.digest()


def check_page(page: bytes) -> None:
    """Raises StoreError unless `page` is a hash of HASH_BYTES bytes."""
    if type(page) is not bytes or len(page) != HASH_BYTES:
        raise StoreError(f"page hash {page!r} is not {HASH_BYTES} bytes")
