"""Namespaces of a keeper: opened by who knows their model, or found by tools; and how a location names a keeper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvmover.errors import StoreError
from kvmover.store.files import reason_of
from kvmover.store.keeper.link import KeeperLink
from kvmover.store.keeper.messages import LISTED, VERSION, Attach, Listed, ListNamespaces
from kvmover.store.keeper.objects import KeeperObjects
from kvmover.store.manifest import Found, Manifest, decode_manifest, encode_manifest, in_order
from kvmover.store.namespace import Namespace
from kvmover.store.policy import Policy


@dataclass(frozen=True, slots=True)
class KeeperLocation:
    """A socket, and who comes: a generation of a fleet, which fences those before it; "" and 0 is nobody.

    >>> KeeperLocation.parse("keeper:///run/kv.sock?fleet=decode&generation=3")
    KeeperLocation(path=PosixPath('/run/kv.sock'), fleet='decode', generation=3)
    """

    path: Path
    fleet: str = ""
    generation: int = 0

    @classmethod
    def parse(cls, text: str) -> KeeperLocation:
        """Raises StoreError for what names no socket, or nobody."""
        parts = urlsplit(text)
        said = dict(parse_qsl(parts.query, keep_blank_values=True))
        fleet, generation = said.pop("fleet", ""), said.pop("generation", "0")
        is_sound = parts.scheme == "keeper" and not parts.netloc and parts.path.startswith("/") and not said
        if not is_sound or not generation.isascii() or not generation.isdigit() or (int(generation) and not fleet):
            raise StoreError(f"{text} is no keeper; one is keeper:///PATH.sock?fleet=NAME&generation=NUMBER")
        return cls(Path(unquote(parts.path)), fleet, int(generation))


def open_keeper(location: str, namespace: Namespace, policy: Policy) -> KeeperObjects:
    """The pages of `namespace` with the keeper of a location. Raises StoreError; StoreFenced is one."""
    return _open(location, namespace.digest, encode_manifest(namespace), policy)


def keeper_of_namespace(found: Found, policy: Policy) -> KeeperObjects:
    """A namespace that was found, for tools that know no model: they own nothing. Raises StoreError."""
    location = str(found.folder).removesuffix("/" + found.name)
    return _open(location, found.digest, b"", policy)


def _open(location: str, namespace: bytes, manifest: bytes, policy: Policy) -> KeeperObjects:
    at = KeeperLocation.parse(location)
    link = KeeperLink(at.path, Attach(VERSION, namespace, manifest, at.fleet, at.generation))
    try:
        return KeeperObjects(link, policy)
    except OSError as error:
        raise StoreError(f"cannot open the page store in {location}: {reason_of(error)}") from error


def keeper_namespaces(location: str) -> list[Found]:
    """Every namespace of a keeper, by model. Raises StoreError."""
    at = KeeperLocation.parse(location)
    link, manifests = KeeperLink(at.path, None), list[bytes]()
    try:
        while True:
            listed, _ = link.ask(ListNamespaces(len(manifests)), Listed)
            manifests += listed.manifests
            if len(listed.manifests) < LISTED:
                break
    except OSError as error:
        raise StoreError(f"cannot read {location}: {reason_of(error)}") from error
    finally:
        link.close()
    known = [manifest for data in manifests if (manifest := _manifest(data))]
    return in_order([Found(f"keeper://{at.path}/{each.digest[:32]}", each) for each in known])


def _manifest(data: bytes) -> Manifest | None:
    import msgspec

    try:
        folder = msgspec.json.decode(data, type=Manifest).digest[:32]
    except (msgspec.DecodeError, ValueError):
        return None
    return decode_manifest(data, folder)
