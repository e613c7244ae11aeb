"""Memory is given back by a thread of its own, after its device is done: finalisers call nothing of CUDA's."""

from __future__ import annotations

import ctypes
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvmover.kernels import cuda_driver, releases
from kvmover.kernels.device_tensor import DeviceMemory
from kvmover.kernels.pinned import PORTABLE, pinned
from kvmover.kernels.releases import RELEASES, Releases
from tests.counting_driver import CountingDriver

GPU = torch.device("cuda", 1)


class Owner:
    """Something that dies."""


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, str]]:
    """The devices that were waited for, each with the thread that did. The thread of this process begins anew."""
    found = list[tuple[torch.device, str]]()
    monkeypatch.setattr(cuda_driver, "library", CountingDriver)
    monkeypatch.setattr(RELEASES, "_thread", None)
    monkeypatch.setattr(releases, "wait_for", lambda device: found.append((device, threading.current_thread().name)))
    return found


def test_a_release_waits_for_its_device_in_a_thread_that_leaves_captures_alone(
    waited: list[tuple[torch.device, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, told, by = CountingDriver(), threading.Event(), list[str]()
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)

    def give_back() -> None:
        by.append(threading.current_thread().name)
        told.set()

    made, owner = Releases(), Owner()
    made.when_dead(owner, GPU, give_back)
    assert not told.wait(0.05)
    del owner
    assert told.wait(10)
    assert by == ["kvmover-releases"]
    assert waited == [(GPU, "kvmover-releases")]
    assert driver.calls == ["cuThreadExchangeStreamCaptureMode 1"]


def test_memory_is_not_given_back_under_work_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were launched before its owner died go on to read and write it."""
    current, running = [torch.device("cuda", 0)], {0: [1], 1: [1, 2]}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: running[device.index].clear())
    monkeypatch.setattr(cuda_driver, "library", CountingDriver)
    made, owner, told = Releases(), Owner(), SimpleQueue[tuple[object, list[int]]]()
    made.when_dead(owner, GPU, lambda: told.put((current[0], list(running[1]))))
    del owner
    assert told.get(timeout=10) == (GPU, [])
    assert running[0] == [1], "another device is not waited for"


def test_memory_that_the_driver_keeps_is_logged_and_the_next_is_given_back(
    waited: list[tuple[torch.device, str]], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        cuda_driver.check(700, "cuMemFree")

    made, told = Releases(), threading.Event()
    for give_back in (fail, told.set):
        owner = Owner()
        made.when_dead(owner, GPU, give_back)
        del owner
    assert told.wait(10)
    assert "memory of cuda:1 is lost until the process ends" in caplog.text
    assert "cuMemFree failed with CUDA error 700" in caplog.text


def test_a_tensor_of_device_memory_keeps_it(waited: list[tuple[torch.device, str]]) -> None:
    buffer, told = ctypes.create_string_buffer(64), threading.Event()
    memory = DeviceMemory.of(torch.device("cpu"), 64, lambda: (ctypes.addressof(buffer), told.set))
    part = memory.tensor(16, 8)
    part.fill_(7)
    assert buffer.raw[16:24] == bytes([7] * 8)
    del memory
    assert not told.wait(0.05)
    del part
    assert told.wait(10)


def test_pinned_memory_is_plain_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for nbytes in (0, 1, 4097):
        assert (pinned(nbytes).shape, pinned(nbytes).dtype) == ((nbytes,), torch.uint8)


def test_pinned_memory_is_freed_with_its_last_tensor(
    waited: list[tuple[torch.device, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, freed = ctypes.create_string_buffer(4097), SimpleQueue[int]()

    def allocate(out: Any, nbytes: ctypes.c_size_t, flags: ctypes.c_uint) -> int:
        assert (nbytes.value, flags.value) == (4097, PORTABLE)
        out._obj.value = ctypes.addressof(memory)
        return 0

    def free(address: ctypes.c_void_p) -> int:
        freed.put(address.value or 0)
        return 0

    exchange = CountingDriver().cuThreadExchangeStreamCaptureMode
    fake = SimpleNamespace(cuMemHostAlloc=allocate, cuMemFreeHost=free, cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(cuda_driver, "library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = pinned(4097)
    found[4096] = 7
    assert memory.raw[4096] == 7
    assert (found.dtype, found.shape) == (torch.uint8, (4097,))
    view = found[1:].view(-1)
    del found
    assert freed.empty()
    del view
    assert freed.get(timeout=10) == ctypes.addressof(memory)
    assert waited == [(GPU, "kvmover-releases")]
