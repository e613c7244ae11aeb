"""A replay runs over both cores, the one in C and the Python that defines it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmover.cache.prefix import forest, hashes, keys
from kvmover.tools.replay import ideal, simulated_tiers

CORES = ["python"] if forest.C_CORE is None else ["c", "python"]


@pytest.fixture(scope="module", params=CORES)
def used_core(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which core replays have that are made meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(forest, "C_CORE", None)
            patch.setattr(hashes, "chain_bytes", hashes.chain_in_python)
            for module in (keys, ideal, simulated_tiers):
                patch.setattr(module, "NATIVE", None)
        yield request.param
