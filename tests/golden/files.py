"""Golden files: bytes as hexadecimal digits, 32 bytes a line, so that a change of format shows in a diff."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "formats"


def read(name: str) -> bytes:
    """Returns the bytes of a value, `FORMAT/NAME`."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def write(name: str, data: bytes) -> None:
    """Write the file of a value."""
    path = FOLDER / f"{name}.hex"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{data[at : at + 32].hex()}\n" for at in range(0, len(data), 32)))
