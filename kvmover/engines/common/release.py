"""Tested names the releases of an engine that an adapter was tested with: it uses internals, which change with each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvmover.errors import KvmoverError


class EngineUnsupported(KvmoverError):
    """An engine that is not there, or a release of it or a setting of it that an adapter was not made for."""


def odd_ones(odd: Mapping[str, bool]) -> str:
    """What is so, of settings by their words; empty for none.

    >>> odd_ones({"pipeline stages": False, "windows": True, "states": True})
    'windows, states'
    """
    return ", ".join(name for name, is_odd in odd.items() if is_odd)


@dataclass(frozen=True, slots=True)
class Tested:
    """`package` is the engine's distribution and `adapters` the module that it loads."""

    engine: str
    package: str
    releases: tuple[str, ...]
    adapters: str

    def check(self, found: str) -> None:
        """Raise EngineUnsupported unless `found` is a tested release, whatever its local build tag (`+cu130`)."""
        if found.partition("+")[0] not in self.releases:
            tested = f"{self.package} {', '.join(self.releases)}"
            raise EngineUnsupported(f"kvmover's adapters for {self.engine} were tested with {tested}, not with {found}")

    def require(self) -> None:
        """Raise EngineUnsupported unless the installed engine is a tested release."""
        try:
            found = version(self.package)
        except PackageNotFoundError:
            raise EngineUnsupported(
                f"{self.package} is not installed; {self.adapters} is loaded by {self.engine}"
            ) from None
        self.check(found)
