"""What the tests of this folder share: one thread of torch, since its workers spin after each small copy."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvmover import shared_memory

MOST_POOLS = 100


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """On two busy cores fills and clones of small pools took 3 ms each with two threads: half of the tests' time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    """Movers are in cycles, and Python collects seldom in a large process: shared pools keep a descriptor till then."""
    yield
    if len(shared_memory._ALLOCATED) > MOST_POOLS:
        gc.collect()
