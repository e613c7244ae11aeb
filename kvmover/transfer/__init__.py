"""Moving requests: the handshake, two pure state machines, an arena, and the Mover that an engine holds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmover.transfer.handshake import Model, Place
    from kvmover.transfer.mover import Mover
    from kvmover.transfer.result import MoverConfig, Result, Transfer

_HOME = {
    "Model": "handshake",
    "Mover": "mover",
    "MoverConfig": "result",
    "Place": "handshake",
    "Result": "result",
    "Transfer": "result",
}

__all__ = ["Model", "Mover", "MoverConfig", "Place", "Result", "Transfer"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
