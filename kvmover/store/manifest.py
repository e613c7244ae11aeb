"""A Manifest describes a namespace's directory for people and tools: no read or write depends on it."""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmover.errors import StoreError
from kvmover.layout import PACKED_ORDER
from kvmover.prepared import prepared
from kvmover.store.namespace import Namespace
from kvmover.store.record import PREAMBLE_BYTES, Preamble
from kvmover.store.segment import HEAD, segments_in, sync_folder

MANIFEST = "namespace.json"

#: The name of every format, and this release's number.
_FORMATS = "kvmover.store/"
_FORMAT = f"{_FORMATS}1"


@prepared
class Manifest(Struct, frozen=True):
    """A description of a namespace. `salted` replaces the salt, which stays secret. Later releases may add fields."""

    format: str
    digest: str
    model: str
    weights: str
    page_tokens: int
    order: str
    salted: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A namespace under a root. `folder`: a directory, or as text a location in an object store.

    `manifest`: holds only the digest if its file was damaged.
    """

    folder: Path | str
    manifest: Manifest

    @property
    def name(self) -> str:
        """Returns the last part of the folder: hexadecimal digits."""
        return str(self.folder).rpartition("/")[2]

    @property
    def digest(self) -> bytes:
        """Returns the namespace's digest, 32 bytes."""
        return bytes.fromhex(self.manifest.digest)


#: The model of a namespace whose manifest is damaged.
UNKNOWN = "(unknown)"


def encode_manifest(namespace: Namespace) -> bytes:
    """Returns the JSON of a namespace's manifest file."""
    salted, digest = bool(namespace.salt), namespace.digest.hex()
    shape = namespace.page_tokens, namespace.order
    called = namespace.model or namespace.hint
    return msgspec.json.encode(Manifest(_FORMAT, digest, called, namespace.weights, *shape, salted))


def decode_manifest(data: bytes, folder: str) -> Manifest | None:
    """Decode a manifest file in the folder of that name; None if damaged or of another folder."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        mine = manifest.format == _FORMAT and bytes.fromhex(manifest.digest)[:16].hex() == folder
    except (msgspec.DecodeError, ValueError):
        return None
    return manifest if mine else None


@prepared
class _AnyFormat(Struct):
    format: str


def must_stay(data: bytes, folder: str) -> bool:
    """Returns True if a manifest file is sound and of the folder of that name, or of another format: it stays."""
    try:
        said = msgspec.json.decode(data, type=_AnyFormat).format
    except (msgspec.DecodeError, ValueError):
        return False
    return (said.startswith(_FORMATS) and said != _FORMAT) or decode_manifest(data, folder) is not None


def write_manifest(folder: Path, namespace: Namespace) -> None:
    """Write the manifest atomically, also across a power cut. Raises OSError.

    A damaged file is rewritten, one of another format stays. The file's mtime is the last time that a process opened
    the namespace by its model.
    """
    path = folder / MANIFEST
    with suppress(FileNotFoundError, NotADirectoryError):
        if must_stay(path.read_bytes(), folder.name):
            with suppress(OSError):
                os.utime(path)
            return
    fresh = folder / f"{uuid.uuid4().hex}.tmp"
    with fresh.open("wb") as file:
        file.write(encode_manifest(namespace))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(folder)
    sync_folder(folder.parent)


def _manifest(path: Path) -> Manifest | None:
    """Read a manifest; None if missing, damaged, or of another directory. Raises OSError."""
    try:
        return decode_manifest(path.read_bytes(), path.parent.name)
    except (FileNotFoundError, NotADirectoryError):
        return None


def namespaces(root: Path) -> list[Found]:
    """List every namespace under `root`, by model. If its manifest is damaged, its segments identify it.

    Raises StoreError if `root` is no directory, or an entry cannot be read.
    """
    try:
        if not root.is_dir():
            raise StoreError(f"{root} is not a directory")
    except OSError as error:
        raise StoreError(f"cannot read {root}: {error.strerror}") from error
    found: list[Found] = []
    for folder in sorted(_entries(root)):
        try:
            manifest = _manifest(folder / MANIFEST) or _by_segments(folder)
        except OSError as error:  # an unreadable manifest is not a missing one
            raise StoreError(f"cannot read {folder / MANIFEST}: {error.strerror}") from error
        if manifest:
            found.append(Found(folder, manifest))
    return in_order(found)


def in_order(found: list[Found]) -> list[Found]:
    """Sort namespaces by model, weights and name."""
    return sorted(found, key=lambda each: (each.manifest.model, each.manifest.weights, each.name))


def unknown(digest: bytes) -> Manifest:
    """Returns the manifest of a namespace of which only the digest is known."""
    return Manifest(_FORMAT, digest.hex(), UNKNOWN, UNKNOWN, 0, PACKED_ORDER, False)


def _by_segments(folder: Path) -> Manifest | None:
    """Read the digest alone, from the first head file of this folder. Raises OSError."""
    if not re.fullmatch("[0-9a-f]{32}", folder.name) or not folder.is_dir():
        return None
    for name in sorted(segments_in(folder)):
        with (folder / (name + HEAD)).open("rb") as head:
            preamble = Preamble.decode(head.read(PREAMBLE_BYTES))
        if preamble and preamble.namespace[:16].hex() == folder.name:
            return unknown(preamble.namespace)
    return None


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except OSError as error:
        raise StoreError(f"cannot read {root}: {error.strerror}") from error
