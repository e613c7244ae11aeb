"""Stores in pools of memory as the tests open them: over a real client, over one in this process, or a failing one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from store_rank import SPACE

from kvmover.store import Namespace, PageStore, Policy
from kvmover.store.mooncake.client import MooncakeClient, PoolClient
from kvmover.store.mooncake.pool_objects import MooncakeObjects

#: What Mooncake says to what went wrong: no object, no room, a range outside, no transfer, no master, a late master.
NO_OBJECT, NO_ROOM, OUT_OF_RANGE, NOT_MOVED, NO_MASTER, LATE_MASTER = -704, -200, -600, -800, -900, -901


class DictClient:
    """A pool in this process, which answers as Mooncake 0.3.13 does."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self.objects.setdefault(key, ctypes.string_at(address, size))
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self._get(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def _get(self, key: str, address: int, size: int) -> int:
        data = self.objects.get(key)
        if data is None:
            return NO_OBJECT
        if len(data) > size:
            return OUT_OF_RANGE
        ctypes.memmove(address, data, len(data))
        return len(data)

    def get_into_ranges(
        self,
        addresses: list[int],
        keys: list[list[str]],
        targets: list[list[list[int]]],
        sources: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        return [
            [[self._range(key, base + to, at, size) for to, at, size in zip(*each, strict=True)] for key, *each in rows]
            for base, rows in zip(
                addresses,
                (list(zip(*row, strict=True)) for row in zip(keys, targets, sources, sizes, strict=True)),
                strict=True,
            )
        ]

    def _range(self, key: str, address: int, at: int, size: int) -> int:
        data = self.objects.get(key)
        if data is None:
            return NO_OBJECT
        if at + size > len(data):
            return OUT_OF_RANGE
        ctypes.memmove(address, data[at : at + size], size)
        return size

    def get_batch(self, keys: list[str]) -> list[bytes]:
        return [self.objects.get(key, b"") for key in keys]

    def get_size(self, key: str) -> int:
        return len(self.objects[key]) if key in self.objects else NO_OBJECT

    def put(self, key: str, value: bytes, config: Any) -> int:
        self.objects.setdefault(key, value)
        return 0

    def remove(self, key: str, force: bool) -> int:
        return 0 if self.objects.pop(key, None) is not None else NO_OBJECT

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        found = [key for key in self.objects if key.startswith(pattern[1:].replace("[.]", "."))]
        for key in found:
            del self.objects[key]
        return len(found)

    def close(self) -> int:
        return 0


#: Calls that answer for each of the keys that are their first argument.
_BATCHES = ("batch_is_exist", "batch_put_from", "batch_get_into")


class FaultyClient:
    """A client that several stores share, and which knows the keys that were put. `fails` says of each call, by its
    number and name, with which code of Mooncake's it fails; 0: it does not.
    """

    def __init__(self, client: Any, kept: Any = None) -> None:
        self.client, self.kept = client, kept
        self.calls: list[str] = []
        self.keys: dict[str, None] = {}
        self.fails: Callable[[int, str], int] = lambda _number, _name: 0
        self.before: Callable[[str], None] = lambda _name: None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            code = self.fails(len(self.calls), name)
            self.calls.append(name)
            self.before(name)
            if code:
                return self._failed(name, arguments, code)
            if name in ("put", "batch_put_from"):
                self.keys.update(dict.fromkeys([arguments[0]] if name == "put" else arguments[0]))
            return getattr(self.client, name)(*arguments)

        return call

    @staticmethod
    def _failed(name: str, arguments: Sequence[Any], code: int) -> Any:
        if name in _BATCHES:
            return [code] * len(arguments[0])
        if name == "get_into_ranges":
            return [[[code] * len(row) for row in rows] for rows in arguments[4]]
        return [b""] * len(arguments[0]) if name == "get_batch" else code

    def register_buffer(self, address: int, nbytes: int) -> int:
        return self.client.register_buffer(address, nbytes)

    def unregister_buffer(self, address: int) -> int:
        return self.client.unregister_buffer(address)

    def close(self) -> int:
        return 0


def open_over(
    client: MooncakeClient | FaultyClient | DictClient,
    space: Namespace = SPACE,
    prefix: str = "kvmover",
    policy: Policy | None = None,
) -> PageStore:
    """A store over a client: another call is another process's."""

    def opens(space: Namespace) -> MooncakeObjects:
        pool = PoolClient("mooncake://test", client, getattr(client, "kept", None))  # pyright: ignore[reportArgumentType]
        return MooncakeObjects(pool, f"{prefix}/{space.folder}", policy or Policy())

    return PageStore(space.folder, opens(space), opens)
