"""Staging memory of a GPU: what the driver is asked for, in which order, and what is left when it refuses."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from fake_cuda import GRAIN, REFUSED, FakeCuda, collected, drive

from kvmover.kernels.cuda_exports import HandleKind, exported
from kvmover.kernels.cuda_virtual import FABRIC, FABRIC_SUPPORTED, RDMA_SUPPORTED
from kvmover.tools.doctor.host_checks import nvlink
from kvmover.tools.doctor.process_checks import Status
from kvmover.transfer.config import Exports
from kvmover.transfer.memory.staging import Staging, of_driver

CPU = torch.device("cpu")
NBYTES = 3 << 20
MAKE = ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
BACK = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    driver = FakeCuda("fabric", attributes=(FABRIC_SUPPORTED, RDMA_SUPPORTED))
    drive(driver, monkeypatch)
    return driver


@pytest.mark.parametrize("exports", [Exports.ARENAS, Exports.POOLS])
def test_an_arena_of_the_fabric_is_pinned_reached_by_nics_and_exported(exports: Exports, fake: FakeCuda):
    tensor = of_driver(NBYTES, CPU, exports)
    assert len(tensor) == NBYTES
    tensor.fill_(7)
    assert [call for call in fake.calls if call in MAKE] == MAKE
    kind, handles, where, device, _, compressed, rdma = struct.unpack("iiiiQBB", fake.properties[:26])
    assert (kind, handles, where, device, compressed, rdma) == (1, FABRIC, 1, 0, 0, 1)
    export = exported(tensor.data_ptr(), CPU)
    assert export is not None
    assert (export.kind, export.nbytes, export.offset) == (HandleKind.FABRIC, 2 * GRAIN, 0)
    made = len(fake.calls)
    del tensor
    collected()
    assert fake.calls[made:] == BACK


@pytest.mark.parametrize("step", MAKE)
def test_where_the_fabric_is_not_set_up_arenas_are_plain_and_nothing_is_left(
    step: str, fake: FakeCuda, caplog: pytest.LogCaptureFixture
):
    fake.fails = step
    tensor = of_driver(NBYTES, CPU, Exports.ARENAS)
    assert len(tensor) == NBYTES
    assert f"{step} failed" in caplog.text
    done = MAKE.index(step)
    assert fake.calls[-1 - done :] == [*BACK[len(BACK) - done :], "cuMemAlloc_v2"]
    del tensor
    collected()
    assert fake.calls[-1] == "cuMemFree_v2"


@pytest.mark.parametrize(("exports", "attributes"), [(Exports.NONE, (FABRIC_SUPPORTED,)), (Exports.ARENAS, ())])
def test_arenas_that_nobody_is_to_map_are_plain_allocations_of_the_driver(
    exports: Exports, attributes: tuple[int, ...], fake: FakeCuda, caplog: pytest.LogCaptureFixture
):
    fake.attributes = attributes
    tensor = of_driver(NBYTES, CPU, exports)
    assert len(tensor) == NBYTES
    assert not set(MAKE) & set(fake.calls)
    assert fake.calls[-1] == "cuMemAlloc_v2"
    assert not caplog.text


def test_on_a_cpu_no_driver_is_asked(fake: FakeCuda):
    staging = Staging.of(NBYTES, 0, CPU, Exports.POOLS)
    assert staging.memory.nbytes == NBYTES
    assert not fake.calls


def test_the_doctor_says_what_crosses_hosts_over_nvlink(tmp_path: Path):
    assert not list(nvlink(tmp_path, {}))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (missing,) = nvlink(tmp_path, {})
    assert (missing.status, missing.detail) == (
        Status.MISSING,
        "across hosts: neither arenas nor pools, no channel of IMEX",
    )
    (tmp_path / "dev/nvidia-caps-imex-channels").mkdir()
    (tmp_path / "dev/nvidia-caps-imex-channels/channel0").touch()
    found, segments = nvlink(tmp_path, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"})
    assert (found.status, found.detail[:37]) == (Status.OK, "across hosts: arenas yes, with mover.")
    assert found.detail.endswith("pools no")
    assert segments.status is Status.PROBLEM


def test_an_undo_that_the_driver_refuses_keeps_no_other_undo_from_being_made(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fake.fails = "cuMemSetAccess"
    monkeypatch.setattr(fake, "cuMemUnmap", lambda *_: REFUSED, raising=False)
    tensor = of_driver(NBYTES, CPU, Exports.ARENAS)
    assert len(tensor) == NBYTES
    assert "cuMemSetAccess failed" in caplog.text, "the error of the call, and not of its undo"
    assert fake.calls[-3:] == ["cuMemAddressFree", "cuMemRelease", "cuMemAlloc_v2"]
    del tensor
    collected()
    assert fake.calls[-1] == "cuMemFree_v2"
