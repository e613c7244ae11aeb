"""Fixtures of the kernels' tests."""

from __future__ import annotations

from pathlib import Path

import bulk_cases
import numpy as np
import pytest
import torch
from ahead import Ahead
from bulk_cases import Locate
from compilers import Limited
from row_moves import SPARSE_BYTES


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """A pool of more bytes than 32 bits count, in a file without blocks: only what is written costs anything."""
    path: Path = tmp_path_factory.mktemp("sparse") / "pool"
    try:
        with path.open("wb") as file:
            file.truncate(SPARSE_BYTES)
        memory = np.memmap(path, np.uint8, "r+")
    except OSError as error:
        pytest.skip(f"no sparse file of {SPARSE_BYTES >> 30} GiB here: {error}")
    path.unlink()  # gone with the mapping
    return torch.from_numpy(memory)


@pytest.fixture(scope="session")
def compiled_locate(tmp_path_factory: pytest.TempPathFactory) -> Locate:
    """That of bulk.cu."""
    return bulk_cases.locate_of_the_source(tmp_path_factory.mktemp("locate"))


@pytest.fixture(params=["python", "bulk.cu"])
def how(request: pytest.FixtureRequest) -> Locate:
    """What finds a piece of the ring's."""
    return bulk_cases.locate if request.param == "python" else request.getfixturevalue("compiled_locate")


_AHEAD = pytest.StashKey[Ahead]()


def pytest_collection_finish(session: pytest.Session) -> None:
    ahead = session.config.stash[_AHEAD] = Ahead()
    if not session.config.option.collectonly and not hasattr(session.config, "workerinput"):
        ahead.announce(session.items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (ahead := session.config.stash.get(_AHEAD, None)) is not None:
        ahead.close()
        for limited in list(Limited.running):
            limited.kill()


@pytest.fixture(scope="session")
def ahead(request: pytest.FixtureRequest) -> Ahead:
    """What begins when the run does."""
    return request.config.stash[_AHEAD]
