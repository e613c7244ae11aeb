"""Page ids of SGLang's radix cache are written and read on a real GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvmover.engines.sglang.device_indices import DeviceIndices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def no_wait() -> Iterator[None]:
    """An error where torch waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def uploaded(row: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.tensor(row, pin_memory=True).to("cuda", non_blocking=True)


@pytest.mark.parametrize("page_tokens", [1, 64])
@pytest.mark.usefixtures("no_wait")
def test_pages_are_kept_read_moved_and_forgotten_without_waiting(page_tokens: int) -> None:
    indices = DeviceIndices(page_tokens, torch.device("cuda"), uploaded)
    rows = torch.arange(3000 * page_tokens, dtype=torch.int32, device="cuda")
    kept = indices.keep(rows)
    read = indices.of(kept[1000:2000])
    indices.replace(kept[:500], rows[-500 * page_tokens :])
    moved = indices.of(kept[:500])
    pages = indices.forget(kept)
    torch.cuda.set_sync_debug_mode("default")
    rows = rows.to(torch.int64)
    assert torch.equal(read, rows[1000 * page_tokens : 2000 * page_tokens])
    assert torch.equal(moved, rows[-500 * page_tokens :])
    assert torch.equal(pages[500:], rows[500 * page_tokens :: page_tokens] // page_tokens)
