"""What tests of observers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observe.toy_engines import Engines


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.src.close()
    made.dst.close()
