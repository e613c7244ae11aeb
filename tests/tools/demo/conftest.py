"""One crew for all demos that tests run in their own process: starting five takes longer than what they do."""

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
