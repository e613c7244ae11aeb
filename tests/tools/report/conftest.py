"""Reports sum up what the engines of tests/observe moved."""

from __future__ import annotations

from tests.observe.conftest import engines

__all__ = ["engines"]
