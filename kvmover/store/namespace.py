"""A Namespace is what must be equal for two writers to share pages, with the digests that stand for it and a manifest.

No read or write depends on the manifest: it is for people and tools.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmover.errors import StoreError
from kvmover.layout import PACKED_ORDER, Component

#: Bytes of a page's hash, and of the digests here.
HASH_BYTES = 32

_TAG = b"kvmover-store-v1"

#: What a namespace's directory says of itself, for people and tools.
_FILE, _FORMAT = "namespace.json", "kvmover.store/1"

#: What digests are taken of. Named one by one, so that a field that Component gains later does not orphan every store.
_OF_NAMESPACE = ("model", "weights", "page_tokens", "salt", "order")
_OF_COMPONENT = ("name", "layers", "kv", "heads", "dim", "dtype", "states")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Model, weights, page size, object order and tenant. Never a rank: that is the box of an object.

    `weights` names the revision: KV of other weights under the same name is other KV. `salt` separates tenants; it is
    never written down, only its digest is. One namespace is one quota, one order of eviction and one `clear`.
    """

    model: str
    weights: str
    page_tokens: int
    salt: str = field(default="", repr=False)
    order: str = PACKED_ORDER

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


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """`salted` instead of the salt: a tenant's secret stays one."""

    format: str
    digest: str
    model: str
    weights: str
    page_tokens: int
    order: str
    salted: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A namespace under a root."""

    folder: Path
    manifest: Manifest

    @property
    def digest(self) -> bytes:
        """The namespace's digest, 32 bytes, as its manifest has it."""
        return bytes.fromhex(self.manifest.digest)


def write_manifest(folder: Path, namespace: Namespace) -> None:
    """Raises OSError. The file appears whole or not at all."""
    path = folder / _FILE
    if path.exists():
        return
    manifest = Manifest(
        _FORMAT,
        namespace.digest.hex(),
        namespace.model,
        namespace.weights,
        namespace.page_tokens,
        namespace.order,
        bool(namespace.salt),
    )
    fresh = folder / f"{uuid.uuid4().hex}.tmp"
    fresh.write_bytes(msgspec.json.encode(manifest))
    fresh.replace(path)


def namespaces(root: Path) -> list[Found]:
    """Every namespace under `root`, by model. Raises StoreError where `root` is none, or a manifest is damaged."""
    if not root.is_dir():
        raise StoreError(f"{root} is not a directory")
    found: list[Found] = []
    for path in sorted(each / _FILE for each in _entries(root)):
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            if manifest.format != _FORMAT or bytes.fromhex(manifest.digest)[:16].hex() != path.parent.name:
                raise StoreError(f"{path} is of another format, or of another directory")
        except (FileNotFoundError, NotADirectoryError):  # no page store
            continue
        except OSError as error:  # one that is there and cannot be looked at is not none
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreError(f"{path} is no manifest of a page store: {error}") from error
        found.append(Found(path.parent, manifest))
    return sorted(found, key=lambda each: (each.manifest.model, each.manifest.weights, each.folder.name))


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except OSError as error:
        raise StoreError(f"cannot read {root}: {error.strerror}") from error
