"""The modules of lemmas, imported once, in the order of their theorems."""

from __future__ import annotations

from importlib import import_module

NAMES = ("shares", "sets", "plan", "places")


def load() -> None:
    """Import all lemmas."""
    for name in NAMES:
        import_module(f"tests.theorems.lemmas_of_{name}")
