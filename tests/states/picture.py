"""A picture of a mover: a hashable text of all that decides how it answers, equal for movers that answer alike.

The picture walks every attribute of the mover's objects, so that a new one counts unless it is left out by name.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from functools import cache, partial
from hashlib import blake2b
from types import FunctionType, MethodType, NoneType
from typing import Any

import msgspec
import numpy as np
import torch

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.regions import BoundMemory
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.core import Timers
from kvmover.transfer.memory.chunk_tables import ChunkTables
from kvmover.transfer.memory.programs import Compiler
from kvmover.transfer.meter import Meter
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.links import Links
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunks import Lane
from kvmover.transfer.protocol.handshake import Card, Rank
from kvmover.transport.base import Descriptors, Memory
from kvmover.transport.checks import Ranges
from tests.sim.copies import SimCopier
from tests.sim.network import SimNetwork
from tests.sim.seats import SimMappings, SimProcess

#: Objects that never change, or change nothing: values that a request's Want determines, counts, logs and the world.
OPAQUE = (
    BoundMemory,
    ChunkTables,
    Compiler,
    Component,
    Fleet,
    Lane,
    Links,
    Memory,
    Meter,
    MoverConfig,
    Pool,
    PoolSpec,
    SimCopier,
    SimMappings,
    SimNetwork,
    SimProcess,
    torch.Tensor,
    type,
)

#: Attributes that decide nothing, by class: a pace of polls, warnings that are logged once, a value that is worked out
#: again, tickets to come, and serial numbers of registrations, which the play compares.
LEFT_OUT = {
    "Core": {"expected_ends", "repeats", "wall_ns", "meter", "links", "card"},
    "Peer": {"end", "encoded", "card"},
    "Peers": {"_obituaries"},
    "SimTransport": {"_tickets", "_network"},
    "Mover": {"_when_due", "_moved_s", "_thread"},
    "Scorched": {"memory"},
    "_Flight": {"registrations"},
}

#: Attributes that hold encoded messages.
ENCODED = {("Core", "outbox"), ("Early", "want"), ("Early", "said"), ("Note", "payload")}

#: Attributes that hold a card: it counts by its process and its registration.
CARDS = {("Hello", "card"), ("_LostPeer", "card")}

#: The virtual clock starts at 1,000 s: floats beyond 900 are its times, and integers as large in us its stamps.
FIRST_S = 900.0

#: Times before and after it are all alike: no rule looks back so far, and only what is over is remembered for longer.
LONG_AGO_S, FAR_S = -10.0, 100.0


#: (first address, end, name) of each memory.
Places = tuple[tuple[int, int, str], ...]


@dataclass(slots=True)
class Painter:
    """Writes the picture of objects at a time."""

    now: float
    places: Places
    _words: list[str] = field(default_factory=list[str])
    _known: dict[int, int] = field(default_factory=dict[int, int])

    def text(self) -> str:
        return " ".join(self._words)

    def paint(self, value: Any) -> None:
        kind = type(value)
        how = _HOW.get(kind)
        if how is None:
            how = _HOW[kind] = _how(kind)
        how(self, value)

    def _text(self, value: object) -> None:
        self._words.append(repr(value))

    def _float(self, value: float) -> None:
        if FIRST_S < value < math.inf:
            self._words.append(f"t{min(max(value - self.now, LONG_AGO_S), FAR_S):.6f}")
        else:
            self._words.append(repr(value))

    def _int(self, value: int) -> None:
        self._words.append(self._whole(value))

    def _bytes(self, value: bytes) -> None:
        self._words.append(blake2b(value, digest_size=8).hexdigest() if len(value) > 8 else repr(value))

    def _list(self, value: Iterable[Any]) -> None:
        self._words.append("[")
        for each in value:
            self.paint(each)
        self._words.append("]")

    def _set(self, value: Iterable[Any]) -> None:
        self._words += ["{", *sorted(map(self._apart, value)), "}"]

    def _name(self, value: object) -> None:
        self._words.append(type(value).__name__)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        self._words.append(f"{value.dtype}{value.shape}{blake2b(value.tobytes(), digest_size=8).hexdigest()}")

    def _ranges(self, value: Ranges) -> None:
        self._words += sorted(self._range(memory, serial, len(value._serials)) for memory, serial in value.items())

    def _whole(self, value: int) -> str:
        if value > 1 << 32:
            for first, end, name in self.places:
                if first <= value < end:
                    return f"{name}+{value - first}"
        if FIRST_S * 1e6 < value < 4e9:
            return f"u{max(value - round(self.now * 1e6), LONG_AGO_S * 1e6):.0f}"
        return str(value)

    def _apart(self, value: Any) -> str:
        """The picture of a member of a set."""
        other = Painter(self.now, self.places)
        other.paint(value)
        return other.text()

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        self._words.append("(")
        for key, each in value.items():
            self.paint(key)
            self.paint(each)
        self._words.append(")")

    def _value(self, value: object) -> None:
        """An object that never changes."""
        self._words.append(type(value).__name__)
        self._attributes(value, type(value))

    def _object(self, value: object) -> None:
        """An object that is known again where it is met again."""
        if id(value) in self._known:
            self._words.append(f"#{self._known[id(value)]}")
        else:
            self._known[id(value)] = len(self._known)
            self._value(value)

    def _attributes(self, value: Any, kind: type) -> None:
        for name in attributes(kind, value):
            found = getattr(value, name, None)
            if (kind.__name__, name) in ENCODED:
                found = _decoded(found)
            elif (kind.__name__, name) in CARDS:
                found = _carded(found)
            self.paint(found)

    def _call(self, value: Any) -> None:
        if isinstance(value, partial):
            self._call(value.func)
            self.paint(value.args)
        elif isinstance(value, MethodType):
            self._words.append(value.__func__.__qualname__)
            self.paint(value.__self__)
        else:
            self._words.append(value.__qualname__)
            for cell in value.__closure__ or ():
                self.paint(cell.cell_contents)
            self.paint(value.__defaults__)

    def _range(self, memory: Memory, serial: int, first: int) -> str:
        """A registered range. The `first` serial numbers follow addresses; a later one tells of a new registration."""
        return f"{self._whole(memory.address)}:{serial if serial > first else 0}"

    def _timers(self, timers: Timers[Any]) -> None:
        """The due times: a play lets timers that are due at one time come in the order of their names."""
        self._mapping(dict(sorted(timers._due.items(), key=lambda item: repr(item[0]))))


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return [wire.decode(message) for message in wire.split(value)]
    if isinstance(value, Mapping):
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value]


@cache
def _carded(card: bytes) -> tuple[str, int, int]:
    rank = msgspec.msgpack.decode(msgspec.msgpack.decode(card, type=Card).body, type=Rank)
    return rank.place.text(), rank.place.generation, rank.registration


def _how(kind: type) -> Callable[[Painter, Any], None]:
    """Returns the way to paint objects of a class."""
    ways: tuple[tuple[tuple[type, ...], Callable[[Painter, Any], None]], ...] = (
        ((NoneType, bool, str, range, BaseException), Painter._text),
        ((Enum,), Painter._text),
        ((int,), Painter._int),
        ((float,), Painter._float),
        ((bytes,), Painter._bytes),
        ((tuple, list, deque), Painter._list),
        ((set, frozenset), Painter._set),
        ((Mapping,), Painter._mapping),
        ((*OPAQUE, itertools.count), Painter._name),
        ((np.ndarray,), Painter._array),
        ((FunctionType, MethodType, partial), Painter._call),
        ((Timers,), Painter._timers),
        ((Ranges,), Painter._ranges),
        ((Descriptors,), lambda painter, value: painter.paint(value.table.tolist())),
    )
    for kinds, way in ways:
        if issubclass(kind, kinds):
            return way
    return Painter._value if _frozen(kind) else Painter._object


def _frozen(kind: type) -> bool:
    if issubclass(kind, msgspec.Struct):
        return bool(kind.__struct_config__.frozen)
    return is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # pyright: ignore[reportAttributeAccessIssue]


_HOW: dict[type, Callable[[Painter, Any], None]] = {}
_NAMES: dict[type, tuple[str, ...]] = {}


def attributes(kind: type, value: object) -> Iterable[str]:
    """Returns the names of the attributes of an object that count, of slots and of its dictionary."""
    names = _NAMES.get(kind)
    if names is None:
        slots = [getattr(each, "__slots__", ()) for each in kind.__mro__]
        of_slots = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
        known = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else of_slots
        names = tuple(name for name in dict.fromkeys(known) if name[:2] != "__" and name not in _left_out(kind))
        _NAMES[kind] = names
    more = getattr(value, "__dict__", None)
    return (*names, *(name for name in more if name not in _left_out(kind))) if more else names


def _left_out(kind: type) -> set[str]:
    return LEFT_OUT.get(kind.__name__, set())


def state(mover: Mover, now: float, places: Places) -> str:
    """Returns the picture of a mover at a time: with an equal one it answers every event alike.

    Times are relative to `now`, and addresses to their memory, of `places`.
    """
    painter = Painter(now, places)
    painter.paint(mover)
    return painter.text()


def places_of(movers: Iterable[Mover]) -> Places:
    """Returns where the pools and arenas of movers lie."""
    found = list[tuple[int, int, str]]()
    for mover in movers:
        core = mover._core
        tensors = [*(tensor for pool in core.pools for tensor in pool.tensors)]
        for number, tensor in enumerate([*tensors, core.incoming.tensor, core.outgoing.tensor]):
            first = tensor.data_ptr()
            found.append((first, first + tensor.nbytes, f"{core.transport.name}.{number}"))
    return tuple(found)


def contents_of(mover: Mover) -> list[bytes]:
    """Returns the bytes that may decide something: of pools, and of regions of an arena that are in use."""
    core = mover._core
    found = [tensor.numpy().tobytes() for pool in core.pools for tensor in pool.tensors]
    for staging in (core.outgoing, core.incoming):
        memory = staging.tensor.numpy()
        found += [memory[at : at + nbytes].tobytes() for at, nbytes in sorted(staging.arena._reserved.items())]
    return found
