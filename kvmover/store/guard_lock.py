"""A GuardLock knows which thread has it, so that what needs it, or must not run under it, says so and is held to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class GuardLock:
    """A lock that a thread may take again while it has it. `inner`: locks that are taken after this one, never before.

    >>> lock = GuardLock()
    >>> with lock:
    ...     lock.held
    True
    >>> lock.held
    False
    """

    __slots__ = ("_depth", "_inner", "_lock", "_owner")

    def __init__(self, *inner: GuardLock) -> None:
        self._lock, self._inner = RLock(), inner
        self._owner, self._depth = 0, 0

    @property
    def held(self) -> bool:
        """Whether this thread has it."""
        return self._owner == get_ident()

    def __enter__(self) -> None:
        me = get_ident()
        assert self._owner == me or not any(each.held for each in self._inner), "locks are taken in another order"
        self._lock.acquire()
        self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()


class Locked(Protocol):
    """What has a lock."""

    @property
    def lock(self) -> GuardLock:
        """Held for a moment at a time."""
        ...


Owner = TypeVar("Owner", bound=Locked)


def under_lock(
    method: Callable[Concatenate[Owner, Arguments], Answer],
) -> Callable[Concatenate[Owner, Arguments], Answer]:
    """Of a method: whoever calls it has the lock."""

    @wraps(method)
    def checked(self: Owner, *arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        assert self.lock.held, f"{method.__qualname__} was called without the lock"
        return method(self, *arguments, **options)

    return checked


def off_lock(
    method: Callable[Concatenate[Owner, Arguments], Answer],
) -> Callable[Concatenate[Owner, Arguments], Answer]:
    """Of a method: whoever calls it has not got the lock, since it waits for a disk, or takes the lock many times."""

    @wraps(method)
    def checked(self: Owner, *arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        assert not self.lock.held, f"{method.__qualname__} was called under the lock"
        return method(self, *arguments, **options)

    return checked
