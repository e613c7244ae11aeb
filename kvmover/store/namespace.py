"""A Namespace is what must be equal for two writers to share pages, with the digests that stand for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

from kvmover.errors import StoreError
from kvmover.layout import PACKED_ORDER, Component

#: Bytes of a page's hash, and of the digests here.
HASH_BYTES = 32

_TAG = b"kvmover-store-v1"

#: What digests are taken of. Named one by one, so that a field that Component gains later does not orphan every store.
_OF_NAMESPACE = ("model", "weights", "page_tokens", "salt", "order")
_OF_COMPONENT = ("name", "layers", "kv", "heads", "dim", "dtype", "states")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Model, weights, page size, object order and tenant. Never a rank: that is the box of an object.

    `weights` names the revision: KV of other weights under the same name is other KV. `salt` separates tenants; it is
    never written down, only its digest is. One namespace is one quota, one order of eviction and one `clear`.

    Where `weights` say by themselves which these are, as a digest does, `model` is "", and `hint` what people call it:
    that is written down where they look, and is no part of the namespace.
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
        """SHA-256 of all fields, 32 bytes: what directories and head files say instead of them."""
        return _digest(self, None)

    @property
    def folder(self) -> str:
        """Name of the namespace's directory: hexadecimal digits, whatever the fields hold."""
        return self.digest[:16].hex()

    def digest_for(self, component: Component) -> bytes:
        """Of the namespace and all of `component` that its bytes depend on, its logical dtype too (sglang#33268)."""
        return _digest(self, component)


@lru_cache(maxsize=1024)
def _digest(namespace: Namespace, component: Component | None) -> bytes:
    """Length and bytes of every name and value: "ab" beside "c" is not "a" beside "bc"."""
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
    """Raise StoreError unless `page` is a page's hash. It never becomes part of a path, but it is compared whole."""
    if type(page) is not bytes or len(page) != HASH_BYTES:
        raise StoreError(f"page hash {page!r} is not {HASH_BYTES} bytes")
