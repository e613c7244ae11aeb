"""Fixtures of the kernels' tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
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
