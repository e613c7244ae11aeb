"""What tests of the demo share: one crew, since starting five takes longer than what they do, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="package")
def crew() -> Iterator[None]:
    if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
        pytest.skip("no NIXL wheel is installed")
    from kvmover.tools.demo import run as demo
    from kvmover.tools.demo.crew import Crew

    with Crew(5) as processes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "Crew", lambda size: nullcontext(processes))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied slower by two threads, which spin while they wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
