"""Structs are made ready for threads here."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Kind = TypeVar("Kind", bound=msgspec.Struct)


def prepared(kind: type[Kind]) -> type[Kind]:
    """Returns `kind` as it is, with msgspec's description of its fields made now.

    Otherwise msgspec makes that at the first decoding, and two threads that decode first at once crash the process.
    """
    msgspec.msgpack.Decoder(kind)
    return kind
