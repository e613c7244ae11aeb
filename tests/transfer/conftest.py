"""What the tests of this folder share: one thread of torch, since its workers spin after each small copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """On two busy cores fills and clones of small pools took 3 ms each with two threads: half of the tests' time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
