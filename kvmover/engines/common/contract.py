"""A Contract lists the names of an engine that the adapters use, and says which plug-ins a release can have."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvmover.errors import KvmoverError

#: A release, its fix (`.post1`) and its local build tag (`+cu130`). Candidates (`rc1`) and `.dev1` are none.
_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?")

_MISSING = object()

#: The environment variable that says which releases are taken: `strict` takes none that was not tested.
RELEASES = "KVMOVER_ENGINE"

log = logging.getLogger(__name__)


class EngineUnsupported(KvmoverError):
    """An engine that is missing, or a release or setting of it that the adapter does not support."""


def odd_ones(odd: Mapping[str, bool]) -> str:
    """Returns the names whose value is True, joined; "" if there are none.

    >>> odd_ones({"pipeline stages": False, "windows": True, "states": True})
    'windows, states'
    """
    return ", ".join(name for name, is_odd in odd.items() if is_odd)


@dataclass(frozen=True, slots=True)
class Need:
    """A name of an engine that `plugins` use: `module:attribute`, or a module alone.

    `has`: attributes, fields or parameters that it must have. `stand_in`: makes the value that is used where a release
    of the window lacks the name; it goes when that release leaves the window.
    """

    name: str
    plugins: tuple[str, ...]
    has: tuple[str, ...] = ()
    stand_in: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """The names of an engine, its `package`, and the releases that each plug-in was tested with.

    `tested` [plug-in]: releases with all their fixes: "0.33" takes 0.33.0, 0.33.1 and 0.33.0.post1. `adapters`: the
    module that the engine loads. `hooks`: methods that plug-ins wrap once they start, looked for only then, since
    processes that only register plug-ins import none of them.
    """

    engine: str
    package: str
    adapters: str
    tested: Mapping[str, tuple[str, ...]]
    needs: tuple[Need, ...]
    hooks: tuple[Need, ...] = ()

    def require(self, plugin: str) -> None:
        """Raise EngineUnsupported unless the installed release has all names that `plugin` needs.

        With KVMOVER_ENGINE=strict it must have been tested with the plug-in too; else an untested one is logged.
        """
        found, of = self.installed(), f"kvmover's {plugin} for {self.engine}"
        is_tested = is_of(found, self.tested[plugin])
        untested = f"{of} was tested with {self.package} {', '.join(self.tested[plugin])}, not with {found}"
        if _is_strict() and not is_tested:
            raise EngineUnsupported(untested)
        if lacking := self.lacking(plugin):
            raise EngineUnsupported(f"{self.package} {found} lacks {', '.join(lacking)}, which {of} uses")
        if not is_tested:
            log.warning("%s; it has all names that are used, and is tried", untested)

    def compare(self, plugin: str, ours: Mapping[str, object], described: Mapping[str, object]) -> None:
        """Raise EngineUnsupported, with both values, for the first cache that `plugin` would read in another place or
        form than the engine's own description says.
        """
        for cache, theirs in described.items():
            if ours.get(cache) != theirs:
                raise EngineUnsupported(
                    f"kvmover's {plugin} finds the cache of {cache} as {ours.get(cache)}; {self.engine} describes it as"
                    f" {theirs}"
                )

    def installed(self) -> str:
        """Returns the installed release. Raises EngineUnsupported without one."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            raise EngineUnsupported(
                f"{self.package} is not installed; {self.adapters} is loaded by {self.engine}"
            ) from None

    def lacking(self, plugin: str) -> list[str]:
        """Returns the names without a stand-in that `plugin` needs and the installed release lacks."""
        found: list[str] = []
        for need in self.needs:
            if plugin not in need.plugins:
                continue
            value = _value_of(need.name)
            if value is _MISSING:
                found += [] if need.stand_in else [need.name]
            else:
                dot = "." if ":" in need.name else ":"
                found += [f"{need.name}{dot}{name}" for name in need.has if not _has_path(value, name.split("."))]
        return found

    def has(self, method: str) -> bool:
        """Returns True if the installed release has a method, by its full name, which need not be listed."""
        module, owner, name = method.rsplit(".", 2)
        return _value_of(f"{module}:{owner}.{name}") is not _MISSING

    def find(self, name: str) -> Any:
        """Returns the value of a listed name, or its stand-in's. Raises EngineUnsupported if it has neither."""
        need = next(need for need in (*self.needs, *self.hooks) if need.name == name)
        value = _value_of(name)
        if value is not _MISSING:
            return value
        if need.stand_in is None:
            raise EngineUnsupported(f"{self.package} {self.installed()} lacks {name}, which kvmover uses")
        return need.stand_in()


def _is_strict() -> bool:
    said = os.environ.get(RELEASES, "")
    if said not in ("", "strict"):
        raise EngineUnsupported(f"{RELEASES} is {said!r}; it may be 'strict', or be absent")
    return said == "strict"


def of_known_fields(kind: Any, *given: Any, **named: Any) -> Any:
    """Returns an engine's dataclass made of these values, but for those that its release has no field for."""
    return kind(*given, **{name: value for name, value in named.items() if name in kind.__dataclass_fields__})


def is_of(found: str, releases: tuple[str, ...]) -> bool:
    """Returns True if a version is one of these releases, or a fix of one.

    >>> [is_of(found, ("0.32", "0.33")) for found in ("0.33.0", "0.32.4.post1+cu130", "0.33.1rc1", "0.3", "0.34.0")]
    [True, True, False, False, False]
    """
    matched = _RELEASE.fullmatch(found)
    numbers = matched[1].split(".") if matched else []
    return any(numbers[: len(release.split("."))] == release.split(".") for release in releases)


def _value_of(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split(".") if path else (), import_module(module))
    except AttributeError:
        return _MISSING
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return _MISSING
        raise


def _has_path(value: Any, path: list[str]) -> bool:
    name, *rest = path
    return _has(value, name) and (not rest or _has_path(getattr(value, name), rest))


def _has(value: Any, name: str) -> bool:
    """Returns True for an attribute, a field, a parameter, or an attribute that a constructor of the class or of its
    bases sets.
    """
    kinds: tuple[Any, ...] = getattr(value, "__mro__", ())
    if hasattr(value, name) or any(name in getattr(kind, "__annotations__", {}) for kind in kinds):
        return True
    makers: list[Any] = [vars(kind)["__init__"] for kind in kinds if "__init__" in vars(kind)] if kinds else [value]
    codes = [getattr(inspect.unwrap(maker), "__code__", None) for maker in makers]
    return any(name in (*code.co_varnames, *code.co_names) for code in codes if code is not None)
