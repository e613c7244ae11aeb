"""Manifest: what a namespace's directory says of itself, for people and tools. No read or write depends on it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmover.errors import StoreError
from kvmover.store.identity import Namespace

_FILE = "namespace.json"
_FORMAT = "kvmover.store/1"


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
