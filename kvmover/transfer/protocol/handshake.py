"""The handshake: a card that says who a rank is, read in two steps: a stranger is refused before it is understood."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar

import msgspec

from kvmover.errors import LayoutError, OtherWeights, PeerAhead, PeerRefused
from kvmover.fields import whole
from kvmover.kernels.cuda_exports import Export
from kvmover.kernels.cuda_virtual import HANDLE_BYTES
from kvmover.layout.codec import cut_block
from kvmover.layout.component import Component
from kvmover.layout.fleet import Fleet
from kvmover.layout.pool import PoolSpec
from kvmover.plan.recode import error_between, form_text
from kvmover.shared_memory import HostProcess, SharedRange
from kvmover.transfer.protocol.wire import MAX_COMPONENTS, MAX_RANKS, MOST, VERSION, Natural
from kvmover.transport.base import Memory

Value = TypeVar("Value", bound=Hashable)

MAX_CARD_BYTES = 4 << 20

#: Lengths of the names of an engine and of a host, in characters, and of both models' text.
MAX_NAME_CHARACTERS = 256
MAX_MODEL_CHARACTERS = 1 << 16

#: Length of what identifies weights: a digest, a version and a tenant, or the operator's words.
MAX_WEIGHTS_CHARACTERS = 1024

#: What Linux numbers processes up to (PID_MAX_LIMIT).
MAX_PID = 1 << 22

#: Tensors of one component: more than a model has layers, times two.
MAX_ALLOCATIONS = 4096

#: Places where a process waits for connections that a card names, and characters of an IPv6 address.
MAX_LISTENERS = 16
MAX_ADDRESS_CHARACTERS = 45

#: Staging memory holds a region, or chunks could be cut for ever to fit it.
LEAST_STAGING_BYTES = 256

#: How far ahead of our clock a process may have begun: clocks that are hours off are waited for, and no longer ones.
MAX_AHEAD_S = 86400

_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


class Model(msgspec.Struct, frozen=True):
    """A model that both sides must hold alike: the weights, and every component of their cache.

    `weights` identify them, by a digest or a word of the operator's; `name` is then for people, and may differ. Without
    them the name identifies the weights.
    """

    name: str
    components: tuple[Component, ...]
    weights: str = ""

    def __post_init__(self) -> None:
        """Raises LayoutError for a name or weights that are no text, neither of the two, weights that are too long, no
        components, what is no Component, and two of one name; a list of them is taken.
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

    def digest(self) -> bytes:
        """SHA-256 over the protocol version and the model. TP, PP, CP, page size and order may differ, and stay out; so
        do the form in which numbers are stored, and the name of weights that are identified.
        """
        meant = msgspec.structs.replace(
            self,
            name="" if self.weights else self.name,
            components=tuple(component.meant for component in self.components),
        )
        plain = msgspec.to_builtins(meant, order="deterministic")
        for component in plain["components"]:
            del component["codec"]
        return hashlib.sha256(msgspec.msgpack.encode((VERSION, plain))).digest()

    def text(self) -> str:
        """Weights, name, components and protocol version, as PeerRefused shows them. Digests are cut short."""
        meant = [component.meant for component in self.components]
        parts = [f"{c.name} {c.layers}x{c.kv}x{c.heads}x{c.dim} {c.dtype}{_reach(c)}" for c in meant]
        weights = f"weights {_DIGEST.sub(lambda found: found[0][:12], self.weights)} of " if self.weights else ""
        return f"{weights}{self.name} ({', '.join(parts)}), protocol {VERSION}"


def _reach(component: Component) -> str:
    """How its rows go with tokens, where that is not one each."""
    if component.states:
        return f" {component.states} states"
    rows = f" a row every {component.row_tokens} tokens" if component.row_tokens > 1 else ""
    return rows + (f" window {component.window}" if component.window is not None else "")


def check_fleet_pages(fleet: Fleet, components: tuple[Component, ...]) -> None:
    """Raise LayoutError for a fleet that names pages of no component of the model, or whose pages end within a row."""
    unknown = sorted(dict(fleet.pages).keys() - {component.name for component in components})
    if unknown:
        known = ", ".join(component.name for component in components)
        raise LayoutError(f"the fleet names pages of {unknown[0]}, and the model's components are {known}")
    for component in components:
        fleet.page_rows(component)


class Place(msgspec.Struct, frozen=True):
    """Where a rank stands: an engine by name, its fleet, and the rank's number in it.

    `generation` orders the processes that stand there one after the other: a newer one has the larger number, and takes
    the place at once; an older one waits until it has been empty for a while. 0: the nanoseconds since 1970 at which
    the mover was made. Peers refuse one that is more than a day ahead of their own clocks.
    """

    engine: str
    fleet: Fleet
    rank: int
    generation: int = 0

    def __post_init__(self) -> None:
        """Raises LayoutError for a name that is no text, none, or too long, what is no Fleet or too large a one, a rank
        that the fleet does not have, and a generation of more than 63 bits.
        """
        if not isinstance(self.engine, str) or not self.engine:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"an engine is named by text, got {self.engine!r}")
        if len(self.engine) > MAX_NAME_CHARACTERS:
            raise LayoutError(f"an engine's name of {len(self.engine)} characters; at most {MAX_NAME_CHARACTERS}")
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
        """Rank, engine and generation in words, for messages."""
        return f"rank {self.rank} of {self.engine}, generation {self.generation}"

    @property
    def seat(self) -> tuple[str, int]:
        """(engine, rank): at most one live process holds it; a restart takes it over under a new transport name."""
        return self.engine, self.rank


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """Where a process waits for TCP connections, of whatever kind: a numeric address that other hosts may reach."""

    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARACTERS)]
    port: Annotated[int, msgspec.Meta(ge=1, le=(1 << 16) - 1)]

    def is_remote(self) -> bool:
        """Whether it is an address at all, and one that means the same on all hosts."""
        try:
            address = ip_address(self.address)
        except ValueError:
            return False
        return not (address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast)


class Rank(msgspec.Struct, frozen=True):
    """A rank as its peers need to know it: where it stands, how its pools lie, and how to reach its memory.

    `pools`, `allocations`: one a component, in the model's order. `arena` is staging memory that packed chunks are
    written to, `staging` what they are read from, `sandbox` what anybody may write to in order to measure the way here.
    Ranks of one `host` share what is measured. `process` runs on `machine`. `shares`: where each allocation lies in
    shared memory of it, as `allocations`; empty where they do not. `registration`: how often parts of `arena` were
    registered anew, which `transport` knows of. `listeners`: at some of them somebody answers while `process` lives.
    `exports`: as `shares`, of memory on a GPU that its driver opens for others.
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


class Card(msgspec.Struct, frozen=True):
    """Digest first, the rest unread: `body` is a Rank, decoded only when the digests agree. `weights`: the model's."""

    digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    model: Annotated[str, msgspec.Meta(max_length=MAX_MODEL_CHARACTERS)]
    body: bytes
    weights: Annotated[str, msgspec.Meta(max_length=MAX_WEIGHTS_CHARACTERS)] = ""


def write_card(model: Model, rank: Rank) -> bytes:
    """The card of a rank: the model's digest, its text, and the rank's own data, which is read only if the digest is
    equal.
    """
    return msgspec.msgpack.encode(Card(model.digest(), model.text(), msgspec.msgpack.encode(rank), model.weights))


def read_card(model: Model, card: bytes) -> Rank:
    """The peer behind `card`. Raises OtherWeights or PeerRefused with both models' text, or PeerRefused with what is
    wrong with the bytes.
    """
    if len(card) > MAX_CARD_BYTES:
        raise PeerRefused(f"card of {len(card)} bytes is over the limit of {MAX_CARD_BYTES}")
    try:
        envelope = msgspec.msgpack.decode(card, type=Card)
        if envelope.digest != model.digest():
            unlike = OtherWeights if envelope.weights != model.weights else PeerRefused
            raise unlike(f"peer holds {envelope.model}; this side holds {model.text()}")
        rank = msgspec.msgpack.decode(envelope.body, type=Rank)
        _check(model, rank)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerRefused(f"card cannot be read: {error}") from error
    place = msgspec.structs.replace(rank.place, fleet=interned(rank.place.fleet))
    return msgspec.structs.replace(rank, place=place, pools=tuple(map(interned_pool, rank.pools)))


def check_generation(place: Place, wall_ns: int) -> None:
    """Raise PeerAhead for a generation that is over MAX_AHEAD_S ahead of `wall_ns`, the nanoseconds since 1970: no
    process that stands there later would be newer.
    """
    ahead_s = (place.generation - wall_ns) / 1e9
    if ahead_s > MAX_AHEAD_S:
        raise PeerAhead(
            f"{place.text()}, began {ahead_s / 86400:,.1f} days after now, by this side's clock; at most"
            f" {MAX_AHEAD_S / 86400:.0f}: set the clocks, or count generations from 1"
        )


def check_forms(own: Rank, peer: Rank, lossy: float) -> None:
    """Raise PeerRefused where the cache would be off by more than `lossy` after it went from one to the other."""
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
    """The first of equal values: what is kept for one is found for the others by being the same, not by being equal.

    Cards of the ranks of a fleet are decoded one by one, and compared with every request otherwise.
    """
    return _interned(value)


def interned_pool(spec: PoolSpec) -> PoolSpec:
    """As `interned`, the component too: pools of one component may differ."""
    return interned(replace(spec, component=interned(spec.component)))


def _check(model: Model, rank: Rank) -> None:
    """What a decoded card must satisfy before anything is computed from it."""
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
    """What a card says of memory that this side may map: one word for each allocation, of the process it names."""
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
