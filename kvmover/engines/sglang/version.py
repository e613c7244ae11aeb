"""Which releases of SGLang the adapters were tested with: they reach into its internals, which move with each."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvmover.errors import KvmoverError

TESTED = ("0.5.23",)


class EngineUnsupported(KvmoverError):
    """An engine that is not there, or a release of it or a setting of it that the adapter was not made for."""


def check(found: str) -> None:
    """Raise EngineUnsupported unless `found` is a tested release, whatever its local build tag (`+cu130`)."""
    if found.partition("+")[0] not in TESTED:
        raise EngineUnsupported(
            f"kvmover's SGLang adapters were tested with sglang {', '.join(TESTED)}, not with {found}"
        )


def require_tested() -> None:
    """Raise EngineUnsupported unless the installed SGLang is a tested release."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise EngineUnsupported("sglang is not installed; kvmover.engines.sglang is loaded by SGLang") from None
    check(found)
