"""Pictures as clients send them, and one text under all."""

from __future__ import annotations

import random
from base64 import b64encode

#: As large as the model reads it.
_SIDE = 112

TEXT = "What is this? " * 8


def picture(seed: int) -> str:
    """Returns a picture of noise as the URL of its data."""
    pixels = random.Random(seed).randbytes(3 * _SIDE * _SIDE)
    return "data:image/x-portable-pixmap;base64," + b64encode(f"P6 {_SIDE} {_SIDE} 255\n".encode() + pixels).decode()
