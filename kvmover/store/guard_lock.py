"""A GuardLock knows its owning thread, so that methods can assert that they run under it, or outside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class GuardLock:
    """A reentrant lock. `inner`: locks that a thread acquires only after this one; asserted on entry.

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
        """Returns True if the calling thread holds the lock."""
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
    """An object with a GuardLock."""

    @property
    def lock(self) -> GuardLock:
        """The lock, held only briefly at a time."""
        ...


Owner = TypeVar("Owner", bound=Locked)


def under_lock(
    method: Callable[Concatenate[Owner, Arguments], Answer],
) -> Callable[Concatenate[Owner, Arguments], Answer]:
    """Decorate a method to assert that its caller holds the lock."""

    @wraps(method)
    def checked(self: Owner, *arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        assert self.lock.held, f"{method.__qualname__} was called without the lock"
        return method(self, *arguments, **options)

    return checked


def off_lock(
    method: Callable[Concatenate[Owner, Arguments], Answer],
) -> Callable[Concatenate[Owner, Arguments], Answer]:
    """Decorate a method that waits for a disk or takes the lock often: assert that its caller does not hold it."""

    @wraps(method)
    def checked(self: Owner, *arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        assert not self.lock.held, f"{method.__qualname__} was called under the lock"
        return method(self, *arguments, **options)

    return checked
