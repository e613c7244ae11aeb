"""Tables on their way to a device: no thread fills the buffer of another, and all is on the device of the regions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvmover.kernels import cuda_driver, launch
from kvmover.kernels.cuda_driver import Arguments, Function
from kvmover.kernels.launch import RING_BUFFERS, RING_WORDS, Prepared, Program, RowConfig, Upload
from kvmover.kernels.table import Launch

GPU, STREAM = torch.device("cuda", 1), 77


class LateStream(threading.Thread):
    """Does what it is given when it comes to it, as a GPU that is busy."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.given: queue.Queue[Callable[[], object]] = queue.Queue()
        self.start()

    def run(self) -> None:
        while True:
            self.given.get()()


class Event:
    """Passed when the stream comes to it; one that was never recorded has passed, as CUDA has it."""

    def __init__(self, stream: LateStream, before: Callable[[], object]) -> None:
        self.stream, self.before, self.passed = stream, before, threading.Event()
        self.passed.set()

    def record(self) -> None:
        self.passed = passed = threading.Event()
        self.stream.given.put(passed.set)

    def synchronize(self) -> None:
        self.before()
        assert self.passed.wait(10)


class LateTensor:
    """Device memory: a copy into it is done by the stream."""

    def __init__(self, stream: LateStream, words: int) -> None:
        self.stream, self.host = stream, torch.empty(words, dtype=torch.int64)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.stream.given.put(lambda: self.host.copy_(source))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch as `launch` sees it, with a device whose stream is late. `guarded`: the devices that were made current;
    `pinned`: the words of each piece of pinned memory.
    """
    found = SimpleNamespace(stream=LateStream(), before=lambda: None, guarded=[], pinned=[])

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        found.guarded.append(which)
        yield

    def empty(words: int, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> Any:
        if pin_memory:
            found.pinned.append(words)
        return torch.empty(words, dtype=dtype) if device is None else LateTensor(found.stream, words)

    stream = SimpleNamespace(cuda_stream=STREAM)
    cuda = SimpleNamespace(
        Event=lambda: Event(found.stream, lambda: found.before()), device=device, current_stream=lambda _: stream
    )
    fake = SimpleNamespace(empty=empty, from_numpy=torch.from_numpy, int64=torch.int64, device=torch.device, cuda=cuda)
    monkeypatch.setattr(launch, "torch", fake)
    monkeypatch.setattr(launch, "_rings", launch._Rings())
    return found


def table_of(number: int) -> np.ndarray:
    return np.full(64, number, np.int64)


def test_what_one_thread_has_taken_no_other_fills(machine: SimpleNamespace) -> None:
    """A thread is stopped when it has taken a buffer and not yet filled it; another sends a whole ring of tables."""
    others: list[Any] = []
    for number in range(RING_BUFFERS):  # the ring is full from here on
        Upload.here(GPU).to_device(table_of(number))
    done = threading.Event()
    machine.stream.given.put(done.set)
    assert done.wait(10)
    hold = threading.Event()
    machine.stream.given.put(hold.wait)  # no copy is done before all tables were given

    def upload_a_ring() -> None:
        others.extend(Upload.here(GPU).to_device(table_of(1000 + number)) for number in range(RING_BUFFERS))

    def while_taking() -> None:
        machine.before = lambda: None
        thread = threading.Thread(target=upload_a_ring)
        thread.start()
        thread.join()

    machine.before = while_taking
    mine = Upload.here(GPU).to_device(table_of(7))
    done.clear()
    machine.stream.given.put(done.set)
    hold.set()
    assert done.wait(10)
    assert set(mine.host.tolist()) == {7}  # pyright: ignore
    assert [set(out.host.tolist()) for out in others] == [{1000 + number} for number in range(RING_BUFFERS)]


def test_every_table_arrives_as_it_was_given_however_late_the_stream_is(machine: SimpleNamespace) -> None:
    wrong: list[int] = []

    def upload(of: int) -> None:
        given = [(number, Upload.here(GPU).to_device(table_of(number))) for number in range(of, of + 100)]
        passed = threading.Event()
        machine.stream.given.put(passed.set)
        assert passed.wait(10)
        wrong.extend(number for number, out in given if set(out.host.tolist()) != {number})  # pyright: ignore

    threads = [threading.Thread(target=upload, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_uploads_and_launches_are_on_the_device_of_the_regions(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(cuda_driver, "launch", lambda *given: calls.append((*machine.guarded, *given)))
    function, arguments = Function(5, 128, 0), Arguments(())
    laid, table = Launch(table_of(0), 64, 1, 2, ()), SimpleNamespace(device=GPU)
    prepared = Prepared(Program(None, (), RowConfig()), laid, table, 2, (), function, arguments)  # pyright: ignore
    Upload.here(GPU).to_device(table_of(0))
    assert machine.guarded == [GPU, GPU]  # for the ring, and for the table
    prepared.run()
    assert calls == [(GPU, GPU, GPU, function, 2, STREAM, arguments)]


def test_a_ring_is_pinned_in_one_piece_at_first_and_grows_with_its_tables(machine: SimpleNamespace) -> None:
    ring = Upload.here(GPU)
    assert machine.pinned == [RING_BUFFERS * RING_WORDS]
    for number in range(2 * RING_BUFFERS):
        ring.to_device(table_of(number))
    assert Upload.here(GPU) is ring
    assert machine.pinned == [RING_BUFFERS * RING_WORDS]
    ring.to_device(np.zeros(RING_WORDS + 1, np.int64))
    assert machine.pinned == [RING_BUFFERS * RING_WORDS, 2 * RING_WORDS]
