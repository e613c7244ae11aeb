"""The handshake: a card describes a rank, and is read in two steps: digests are compared before the rest is decoded."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.errors import LayoutError, OtherWeights, PeerAhead, PeerRefused
from kvmover.fields import common_version, whole
from kvmover.foreign_text import printable
from kvmover.kernels.cuda_exports import Export
from kvmover.kernels.cuda_virtual import HANDLE_BYTES
from kvmover.layout.codec import cut_block
from kvmover.layout.component import Component
from kvmover.layout.fleet import Fleet
from kvmover.layout.pool import PoolSpec
from kvmover.plan.recode import error_between, form_text
from kvmover.prepared import prepared
from kvmover.shared_memory import HostProcess, SharedRange
from kvmover.transfer.protocol.auth import sealed_part
from kvmover.transfer.protocol.wire import CURRENT, MAX_COMPONENTS, MAX_RANKS, MOST, SEALED, Dialect, Natural
from kvmover.transport.base import Memory

Value = TypeVar("Value", bound=Hashable)

MAX_CARD_BYTES = 4 << 20

#: Characters of the names of an engine and of a host, and of a model's text.
MAX_NAME_CHARACTERS = 256
MAX_MODEL_CHARACTERS = 1 << 16

#: Characters that identify weights: a digest, a version and a tenant, or the operator's words.
MAX_WEIGHTS_CHARACTERS = 1024

#: Largest process number of Linux (PID_MAX_LIMIT).
MAX_PID = 1 << 22

#: Allocations of one component: more than a model has layers, times two.
MAX_ALLOCATIONS = 4096

#: Listeners that a card may name, and characters of an IPv6 address.
MAX_LISTENERS = 16
MAX_ADDRESS_CHARACTERS = 45

#: Fields of a model on a card: ten a component.
MAX_FIELDS = 10 * MAX_COMPONENTS + 2

#: Least staging memory: one region. With less, chunks could be cut for ever to fit it.
LEAST_STAGING_BYTES = 256

#: Most seconds that a generation may be ahead of this clock. Clocks that differ by hours are waited for.
MAX_AHEAD_S = 86400

#: Fields of a component that every card names, and those named unless they have these values.
_MEANT = ("layers", "kv", "heads", "dim", "dtype")
_DEFAULTS = {"window": None, "states": 0, "row_tokens": 1}

#: Names of a card's fields that a refusal lists.
_LISTED_FIELDS = 4

#: The most characters of a card's own text that a refusal has.
_MOST_SAID = 2000

FieldName = Annotated[str, msgspec.Meta(max_length=MAX_WEIGHTS_CHARACTERS)]
ModelText = Annotated[str, msgspec.Meta(max_length=MAX_MODEL_CHARACTERS)]

_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


class Model(msgspec.Struct, frozen=True):
    """A model that both sides must hold alike: the weights, and every component of their cache.

    `weights` identify the weights, by a digest or the operator's word; `name` may differ then. Without them, `name`
    identifies the weights.
    """

    name: str
    components: tuple[Component, ...]
    weights: str = ""

    def __post_init__(self) -> None:
        """Check the fields, and turn a list of components into a tuple. Raises LayoutError for a name or weights that
        are not text, a model with neither, weights over MAX_WEIGHTS_CHARACTERS, and components that are missing, of
        another type, or of equal names.
        """
        for said in (self.name, self.weights):
            if not isinstance(said, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise LayoutError(f"a model is named by text, got {said!r}")
        if not self.name and not self.weights:
            raise LayoutError(f"a model is named by text, got {self.name!r}")
        if len(self.weights) > MAX_WEIGHTS_CHARACTERS:
            said = f"weights of {len(self.weights)} characters; at most {MAX_WEIGHTS_CHARACTERS}"
            raise LayoutError(f"model {self.name} has {said}")
        given: object = self.components
        if not isinstance(given, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"model {self.name} has components = {given!r}; give a tuple of them, as (attention,)")
        for each in self.components:
            if not isinstance(each, Component):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise LayoutError(f"model {self.name} has a component {each!r}, which is no Component")
        names = [each.name for each in self.components]
        if not names:
            raise LayoutError(f"model {self.name} has no components; a cache has one at least")
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise LayoutError(f"model {self.name} has {names.count(twice)} components of the name {twice}")
        msgspec.structs.force_setattr(self, "components", tuple(self.components))

    def fields(self) -> dict[str, str]:
        """Returns the values that both sides must hold alike, by name: `{"attention.heads": "8", ...}`.

        A field at its default is absent, so that one which a later release adds changes no card. TP, PP, CP, page size
        and order, and the stored form of numbers may differ, and stay out; so does `name` if `weights` are given.
        """
        found = {"weights": self.weights} if self.weights else {"name": self.name}
        found["components"] = ", ".join(component.name for component in self.components)
        for meant in (component.meant for component in self.components):
            values = {name: getattr(meant, name) for name in (*_MEANT, *_DEFAULTS)}
            given = {name: value for name, value in values.items() if name in _MEANT or value != _DEFAULTS[name]}
            found |= {f"{meant.name}.{name}": str(value) for name, value in given.items()}
        return found

    def text(self) -> str:
        """Returns weights, name and components for PeerRefused. Digests are cut short."""
        meant = [component.meant for component in self.components]
        parts = [f"{c.name} {c.layers}x{c.kv}x{c.heads}x{c.dim} {c.dtype}{_reach(c)}" for c in meant]
        weights = f"weights {_DIGEST.sub(lambda found: found[0][:12], self.weights)} of " if self.weights else ""
        return f"{weights}{self.name} ({', '.join(parts)})"


def _reach(component: Component) -> str:
    """Returns how rows go with tokens, unless it is one each."""
    if component.states:
        return f" {component.states} states"
    rows = f" a row every {component.row_tokens} tokens" if component.row_tokens > 1 else ""
    return rows + (f" window {component.window}" if component.window is not None else "")


def check_fleet_pages(fleet: Fleet, components: tuple[Component, ...]) -> None:
    """Raise LayoutError for a fleet that names pages of a component that the model lacks, or whose pages end within a
    row.
    """
    unknown = sorted(dict(fleet.pages).keys() - {component.name for component in components})
    if unknown:
        known = ", ".join(component.name for component in components)
        raise LayoutError(f"the fleet names pages of {unknown[0]}, and the model's components are {known}")
    for component in components:
        fleet.page_rows(component)


class Place(msgspec.Struct, frozen=True):
    """The rank id of a mover: an engine by name, its fleet, and the rank's number in it.

    `generation` orders processes with one rank id: a newer one has the larger number and takes over at once; an older
    one waits until the id has been free for a while. 0: the nanoseconds since 1970 when the mover was made. Peers
    refuse a generation that is more than a day ahead of their clocks.
    """

    engine: str
    fleet: Fleet
    rank: int
    generation: int = 0

    def __post_init__(self) -> None:
        """Check the fields. Raises LayoutError for a name that is not text, is empty or too long or does not print, a
        fleet of another type or over MAX_RANKS, a rank outside the fleet, and a generation below 0 or over 63 bits.
        """
        if not isinstance(self.engine, str) or not self.engine:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"an engine is named by text, got {self.engine!r}")
        if len(self.engine) > MAX_NAME_CHARACTERS:
            raise LayoutError(f"an engine's name of {len(self.engine)} characters; at most {MAX_NAME_CHARACTERS}")
        if not self.engine.isprintable():
            raise LayoutError(f"an engine's name is of characters that print, got {self.engine!r}")
        if not isinstance(self.fleet, Fleet):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"{self.engine} has fleet = {self.fleet!r}, which is no Fleet")
        if self.fleet.size > MAX_RANKS:
            raise LayoutError(f"{self.engine} has a fleet of {self.fleet.size} ranks; at most {MAX_RANKS}")
        rank = whole(self.rank, f"{self.engine} has rank", LayoutError, -math.inf)
        if not 0 <= rank < self.fleet.size:
            raise LayoutError(f"rank {rank} of a fleet of {self.fleet.size} ranks")
        msgspec.structs.force_setattr(self, "rank", rank)
        generation = whole(self.generation, f"{self.engine} has generation", LayoutError, 0)
        if generation > MOST:
            raise LayoutError(f"{self.engine} has generation = {generation}, which does not fit 63 bits")
        msgspec.structs.force_setattr(self, "generation", generation)

    def text(self) -> str:
        """Returns rank, engine and generation in words, for messages."""
        return f"rank {self.rank} of {self.engine}, generation {self.generation}"

    @property
    def seat(self) -> tuple[str, int]:
        """(engine, rank): held by at most one live process. A restart takes it over under a new transport name."""
        return self.engine, self.rank


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """A numeric address and port where a process accepts TCP connections that other hosts may open."""

    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARACTERS)]
    port: Annotated[int, msgspec.Meta(ge=1, le=(1 << 16) - 1)]

    def is_remote(self) -> bool:
        """Returns True for a valid address that means the same on all hosts: not loopback, link-local, multicast or
        unspecified.
        """
        try:
            address = ip_address(self.address)
        except ValueError:
            return False
        return not (address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast)


@prepared
class Rank(msgspec.Struct, frozen=True, dict=True):
    """The description of a rank for its peers: its rank id, the layout of its pools, and how to reach its memory.

    `pools`, `allocations`: one a component, in the model's order. Packed chunks are written to `arena` and read from
    `staging`; any peer may write to `sandbox` to measure the path. Ranks of one `host` share measurements. `process`
    runs on `machine`. `shares`: each allocation's range in shared memory of that process, nested as `allocations`;
    empty without shared memory. `registration`: how often parts of `arena` were registered anew, up to the state in
    `transport`. `listeners`: some of them answer while `process` lives. `exports`: as `shares`, for GPU memory that the
    driver opens for other processes.
    """

    place: Place
    pools: Annotated[tuple[PoolSpec, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
    allocations: Annotated[
        tuple[Annotated[tuple[Memory, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)], ...],
        msgspec.Meta(max_length=MAX_COMPONENTS),
    ]
    arena: Memory
    staging: Memory
    transport: bytes
    host: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    sandbox: Memory | None = None
    shares: Annotated[
        tuple[Annotated[tuple[SharedRange, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)], ...],
        msgspec.Meta(max_length=MAX_COMPONENTS),
    ] = ()
    machine: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    registration: Natural = 0
    process: HostProcess | None = None
    listeners: Annotated[tuple[Listener, ...], msgspec.Meta(max_length=MAX_LISTENERS)] = ()
    exports: Annotated[
        tuple[Annotated[tuple[Export, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)], ...],
        msgspec.Meta(max_length=MAX_COMPONENTS),
    ] = ()

    @cached_property
    def addresses(self) -> tuple[npt.NDArray[np.int64], ...]:
        """The address of each allocation [component][allocation]."""
        return tuple(np.array([each.address for each in memories], np.int64) for memories in self.allocations)


@prepared
class Card(msgspec.Struct, frozen=True):
    """The handshake: `body` is a Rank, decoded only if versions and `fields` (`Model.fields`) agree.

    `model`: the fields in words. `speaks`: the least and the most protocol version.
    """

    speaks: tuple[Natural, Natural]
    fields: Annotated[dict[FieldName, ModelText], msgspec.Meta(max_length=MAX_FIELDS)]
    model: ModelText
    body: bytes


def write_card(model: Model, rank: Rank, dialect: Dialect = CURRENT) -> bytes:
    """Returns the card of a rank."""
    return msgspec.msgpack.encode(Card(dialect.speaks, model.fields(), model.text(), msgspec.msgpack.encode(rank)))


def read_card(model: Model, card: bytes, dialect: Dialect = CURRENT) -> Rank:
    """Returns the rank described by `card`. Raises PeerRefused for malformed bytes or without a common protocol
    version, OtherWeights or PeerRefused with both models' text and the names of the fields that differ.
    """
    if len(card) > MAX_CARD_BYTES:
        raise PeerRefused(f"card of {len(card)} bytes is over the limit of {MAX_CARD_BYTES}")
    try:
        envelope = msgspec.msgpack.decode(card, type=Card)
        if common_version(dialect.speaks, envelope.speaks) is None:
            raise PeerRefused(_no_common_version(dialect.speaks, envelope.speaks))
        _check_fields(model, envelope)
        rank = msgspec.msgpack.decode(envelope.body, type=Rank)
        _check(model, rank)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerRefused(f"card cannot be read: {printable(str(error), _MOST_SAID)}") from error
    place = msgspec.structs.replace(rank.place, fleet=interned(rank.place.fleet))
    return msgspec.structs.replace(rank, place=place, pools=tuple(map(interned_pool, rank.pools)))


def agreed_version(card: bytes, dialect: Dialect = CURRENT) -> int:
    """Returns the protocol version to speak with the peer of a `card` that `read_card` has accepted."""
    version = common_version(dialect.speaks, msgspec.msgpack.decode(card, type=Card).speaks)
    assert version is not None, "a card without a common version was accepted"
    return version


def _check_fields(model: Model, card: Card) -> None:
    unlike = _unlike(model.fields(), card.fields)
    if unlike:
        refused = OtherWeights if "weights" in unlike else PeerRefused
        raise refused(_differ(model.text(), card.model, unlike))


def _unlike(own: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]


def _differ(own: str, theirs: str, unlike: Sequence[str]) -> str:
    rest = f" and {len(unlike) - _LISTED_FIELDS} more" if len(unlike) > _LISTED_FIELDS else ""
    listed = printable(", ".join(unlike[:_LISTED_FIELDS]), _MOST_SAID)
    return f"peer holds {printable(theirs, _MOST_SAID)}; this side holds {own}; they differ in {listed}{rest}"


def why_refused(own: bytes, theirs: bytes) -> str | None:
    """Returns the sentence with which the rank of card `own` refuses the card `theirs`, by seal, version and model.

    None if it takes it as far as these go. Seals are not verified: for one who has no key and looks for a fault.
    """
    if own.startswith(SEALED) != theirs.startswith(SEALED):
        sealed, bare = ("this side's", "the peer's") if own.startswith(SEALED) else ("the peer's", "this side's")
        return f"{sealed} card is sealed with a shared key, and {bare} is not"
    try:
        mine, peer = (msgspec.msgpack.decode(sealed_part(card), type=Card) for card in (own, theirs))
    except msgspec.MsgspecError as error:
        return f"card cannot be read: {printable(str(error), _MOST_SAID)}"
    if common_version(mine.speaks, peer.speaks) is None:
        return _no_common_version(mine.speaks, peer.speaks)
    unlike = _unlike(mine.fields, peer.fields)
    return _differ(mine.model, peer.model, unlike) if unlike else None


def _no_common_version(own: tuple[int, int], theirs: tuple[int, int]) -> str:
    said = f"peer speaks protocol versions {theirs[0]} to {theirs[1]}"
    return f"{said}; this side speaks {own[0]} to {own[1]}"


def check_generation(place: Place, wall_ns: int) -> None:
    """Raise PeerAhead for a generation more than MAX_AHEAD_S ahead of `wall_ns`, nanoseconds since 1970: no later
    process with this rank id would be newer.
    """
    ahead_s = (place.generation - wall_ns) / 1e9
    if ahead_s > MAX_AHEAD_S:
        raise PeerAhead(
            f"{place.text()}, began {ahead_s / 86400:,.1f} days after now, by this side's clock; at most"
            f" {MAX_AHEAD_S / 86400:.0f}: set the clocks, or count generations from 1"
        )


def check_forms(own: Rank, peer: Rank, lossy: float) -> None:
    """Raise PeerRefused if the two sides' stored forms can't be converted, or with a relative error above `lossy`."""
    for one, other in zip(own.pools, peer.pools, strict=True):
        held, kept = one.component.form, other.component.form
        if held and kept and cut_block(held, kept):
            raise PeerRefused(
                f"{peer.place.text()} stores {one.component.name} as {form_text(other.component)}, this side as"
                f" {form_text(one.component)}: blocks of the one are cut by parts of the other"
            )
        layers = (rank.place.fleet.shard(one.component, rank.place.rank, 1).layers for rank in (own, peer))
        error = error_between(one, other, *layers)
        if error > lossy:
            raise PeerRefused(
                f"{peer.place.text()} stores {one.component.name} as {form_text(other.component)}, this side as"
                f" {form_text(one.component)}: a number may be off by {error:.3g} of the largest that shares its scale,"
                f" and lossy = {lossy:.3g} tolerates no more"
            )


@lru_cache(maxsize=4096)
def _interned(value: Hashable) -> Any:
    return value


def interned(value: Value) -> Value:
    """Returns the first value equal to this one, so that caches find it by identity instead of comparing.

    Cards of a fleet's ranks are decoded one by one, and would be compared at each request otherwise.
    """
    return _interned(value)


def interned_pool(spec: PoolSpec) -> PoolSpec:
    """Returns the first pool equal to this one, with its component interned too: different pools share a component."""
    return interned(replace(spec, component=interned(spec.component)))


def _check(model: Model, rank: Rank) -> None:
    """Check a decoded card before its numbers are used. Raises PeerRefused with the value that is out of bounds."""
    place = rank.place
    staging = [rank.arena, rank.staging, *([rank.sandbox] if rank.sandbox else [])]
    for memory in (*staging, *(memory for memories in rank.allocations for memory in memories)):
        numbers = memory.address, memory.nbytes, memory.device, memory.address + memory.nbytes
        if min(numbers) < 0 or max(numbers) > MOST:
            raise PeerRefused(f"the card names {memory}, which is beyond 64 bits")
    for what, memory in (("arena", rank.arena), ("staging", rank.staging)):
        if memory.nbytes < LEAST_STAGING_BYTES:
            raise PeerRefused(f"the card has {what} of {memory.nbytes} bytes; a region takes {LEAST_STAGING_BYTES}")
    if rank.process is not None and not 0 < rank.process.pid <= MAX_PID:
        raise PeerRefused(f"the card names process {rank.process.pid}; numbers are 1 to {MAX_PID}")
    if odd := [listener for listener in rank.listeners if not listener.is_remote()]:
        raise PeerRefused(f"the card names {odd[0].address}, port {odd[0].port}, which other hosts do not reach")
    if not 0 <= place.rank < place.fleet.size:
        raise PeerRefused(f"the card names rank {place.rank} of a fleet of {place.fleet.size} ranks")
    if not len(rank.pools) == len(rank.allocations) == len(model.components):
        counts = f"{len(rank.pools)} pools, {len(rank.allocations)} lists of allocations"
        raise PeerRefused(f"the card has {counts}; the model has {len(model.components)} components")
    _check_shared(rank)
    check_fleet_pages(place.fleet, model.components)
    for component, spec, memories in zip(model.components, rank.pools, rank.allocations, strict=True):
        shard = place.fleet.shard(component, place.rank, 1)
        if spec.component.meant != component.meant or spec.page_tokens != place.fleet.page_rows(component):
            raise PeerRefused(f"pool of {spec.component.name}, {spec.page_tokens}-token pages, does not fit its fleet")
        for axis, extent, stride in zip(spec.layout.axes, spec.layout.shape, spec.layout.stride, strict=True):
            if extent * max(stride, 1) * spec.component.element_bytes > MOST:
                shape = f"{axis} extent {extent}, stride {stride}"
                raise PeerRefused(f"pool of {component.name} has {shape}: beyond 64 bits")
        extents = {
            "layer": shard.layers.count,
            "kv": component.kv,
            "head": shard.heads.count,
            "dim": spec.component.dim,
        }
        for axis, extent in extents.items():
            held = spec.layout.extent_of(axis)
            if held != extent:
                raise PeerRefused(f"pool of {component.name} has {axis} extent {held}; its rank holds {extent}")
        if len(memories) != spec.allocations or any(m.nbytes < spec.allocation_bytes for m in memories):
            raise PeerRefused(f"allocations of {component.name} are fewer or smaller than its pool")


def _check_shared(rank: Rank) -> None:
    """Check `shares` and `exports`: one entry an allocation, of the process that the card names. Raises PeerRefused."""
    for what, said in (("shares", rank.shares), ("exports", rank.exports)):
        if said and list(map(len, said)) != list(map(len, rank.allocations)):
            counts = f"{sum(map(len, said))} {what} for {sum(map(len, rank.allocations))} allocations"
            raise PeerRefused(f"the card has {counts}; each must have one, or none")
    for share in (share for pool in rank.shares for share in pool):
        if rank.process is not None and share.pid != rank.process.pid:
            raise PeerRefused(f"the card is of process {rank.process.pid} and shares memory of {share.pid}")
    for export in (export for pool in rank.exports for export in pool):
        if len(export.handle) != HANDLE_BYTES or not 0 <= export.offset < export.nbytes <= MOST:
            sizes = f"{len(export.handle)} bytes to {export.nbytes} bytes from {export.offset} on"
            raise PeerRefused(f"the card has a handle of {sizes}; handles have {HANDLE_BYTES}")
