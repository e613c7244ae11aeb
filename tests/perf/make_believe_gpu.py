"""A make-believe H100: torch's calls of CUDA over the host's memory, and a driver whose launches do as the definitions.

Benchmarks and movers run on it to their end, every byte that they compare is moved, and processes export pools to each
other. No kernel is compiled, and nothing that a clock says of it means anything.
"""

# ruff: noqa: N802
from __future__ import annotations

import ctypes
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any

import torch

from kvmover.kernels import convert, convert_reference, cpu, cuda_driver, device_tensor, digest, launch, releases, rows
from kvmover.kernels.code_store import Code
from kvmover.kernels.convert_reference import Conversion
from kvmover.kernels.launch import Shift
from kvmover.kernels.region import Planes, Region, Side
from kvmover.shared_memory import allocate
from kvmover.transport import nixl_agent
from perf import measured_code
from tests.transfer.fake_cuda import FakeCuda

GPU, NAME, STREAM = torch.device("cuda", 0), "NVIDIA H100 80GB HBM3", 77

#: Pools of this size or more lie in memory that other processes may map.
LEAST_SHARED_BYTES = 16 << 10

_PLAIN = {name: getattr(torch, name) for name in ("zeros", "frombuffer")}
_TO, _TENSOR_AT, _LOAD = torch.Tensor.to, device_tensor.tensor_at, nixl_agent._load


class OnGpu(torch.Tensor):
    """A tensor whose bytes are the host's, and which says that it is on the GPU."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return GPU

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    def cpu(self, *_: object) -> torch.Tensor:
        return on_host(self).clone()

    def numpy(self, *_: object) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, _: object) -> None:
        """All work of a stream is done when its call returns."""


class Moment:
    """An event: the time at which it was recorded."""

    def __init__(self, **_: object) -> None:
        self.at = time.perf_counter()

    def record(self, *_: object) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """All is done."""

    def wait(self, *_: object) -> None:
        """All is done."""

    def elapsed_time(self, end: Moment) -> float:
        return max((end.at - self.at) * 1e3, 1e-6)


class Stream:
    """A stream, which is always idle."""

    cuda_stream, device = STREAM, GPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Moment | None = None) -> Moment:
        return event or Moment()

    def synchronize(self, *_: object) -> None:
        """All is done."""

    wait_event = wait_stream = synchronize


class Graph:
    """What was launched while it was captured."""

    def __init__(self) -> None:
        self.launched = list[Callable[[], None]]()

    def replay(self) -> None:
        for work in self.launched:
            work()


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    """Launches of this thread are the graph's."""
    DRIVER.captured_by = graph.launched
    yield
    DRIVER.captured_by = None


#: A launch's part of its tables, and the addresses of its outputs.
Part = tuple[Shift, list[int]]


class Driver(FakeCuda):
    """`work`: what a launch with a table at this address does; `captured_by`: where launches and copies in batches are
    put off to.
    """

    ABSENT = ("cuMemcpy3DBatchAsync", "cuTensorMapEncodeTiled")

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[int, Callable[[Part], None]] = {}
        self.loaded = 0
        self.captured_by: list[Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.ABSENT:
            raise AttributeError(name)
        return super().__getattr__(name)

    def _cuModuleGetFunction(self, function: Any, _module: Any, _name: bytes) -> None:
        self.loaded += 1
        function._obj.value = self.loaded

    def _cuLaunchKernel(self, _function: int, *rest: Any) -> None:
        *shape, stream, pointers, _ = rest
        assert stream == STREAM, "a launch on no stream"
        assert all(size >= 1 for size in shape[:6])
        outputs = len(pointers) - 8  # beside the table, two counts, the shift and two addresses of scratch memory
        addresses = [ctypes.c_uint64.from_address(each).value for each in pointers[: outputs + 1]]
        units, *nbytes = pointers[outputs + 3 : outputs + 6]
        shift = Shift(
            ctypes.c_uint32.from_address(units).value, *(ctypes.c_int64.from_address(n).value for n in nbytes)
        )
        self._do(partial(self.work[addresses[0]], (shift, addresses[1:])))

    def _do(self, work: Callable[[], None]) -> None:
        work() if self.captured_by is None else self.captured_by.append(work)

    def _cuMemHostAlloc(self, address: Any, nbytes: Any, _flags: Any) -> None:
        memory = (ctypes.c_uint8 * nbytes.value)()
        address._obj.value = ctypes.addressof(memory)
        self._files[address._obj.value] = memory  # pyright: ignore[reportArgumentType]

    def _cuMemFreeHost(self, address: Any) -> None:
        del self._files[address.value]

    def _cuMemcpyBatchAsync_v2(self, dst: Any, src: Any, sizes: Any, count: Any, *_: Any) -> None:
        columns = [(ctypes.c_uint64 * count.value).from_address(each.value) for each in (dst, src, sizes)]
        copies = list(zip(*map(list, columns), strict=True))
        self._do(lambda: [ctypes.memmove(*each) for each in copies] and None)

    def _cuMemcpyAsync(self, dst: Any, src: Any, nbytes: Any, _stream: Any) -> None:
        ctypes.memmove(dst.value, src.value, nbytes.value)


DRIVER = Driver()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, as a tensor of the host's."""
    return tensor.as_subclass(torch.Tensor)  # pyright: ignore[reportArgumentType]


def is_gpu(device: object) -> bool:
    """Whether a device, its name or None is the GPU."""
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def cubin(code: bytes) -> bytes:
    """An ELF file with the machine code of a kernel."""
    names = b"\0.text.kernel\0.shstrtab\0"
    place, header = 64 + len(code) + len(names), struct.Struct("<IIQQQQ24x")
    sections = header.pack(0, 0, 0, 0, 0, 0)
    sections += header.pack(1, 1, 0, 0, 64, len(code)) + header.pack(14, 3, 0, 0, 64 + len(code), len(names))
    start = bytearray(64)
    start[:4] = b"\x7fELF"
    struct.pack_into("<Q", start, 0x28, place)
    struct.pack_into("<HHH", start, 0x3A, header.size, 3, 2)
    return bytes(start) + code + names + sections


def _side(side: Side, first: int, nbytes: int) -> Side:
    """The same side of the host's memory: of its list the part from unit `first` on, so many bytes further. Where a
    request's chunks share a table, the memory is the first one's window, and the part may lie behind it.
    """
    units, memory = side.listed[first : first + len(side.units)], tuple(map(on_host, side.memory))
    if first or nbytes:
        least = int(units.min())
        memory = tuple(
            _TENSOR_AT(each.data_ptr() + least + nbytes, each.numel(), torch.device("cpu")) for each in memory
        )
        units = units - least
    return replace(side, planes=Planes(memory, side.planes.allocation, side.planes.offset), units=units, whole=None)


def _host(each: Any, shift: Shift = launch.UNSHIFTED) -> Any:
    """A region or a conversion between the same bytes, of the host; with a shift, of that part of its lists."""
    src, dst = ((shift.units, nbytes) for nbytes in (shift.src_bytes, shift.dst_bytes))
    return replace(each, src=_side(each.src, *src), dst=_side(each.dst, *dst))


def _launched(found: launch.Prepared | None, work: Callable[[Part], None]) -> launch.Prepared | None:
    """Let the launch of a prepared table do some work, as long as the table lives."""
    if found is not None and found.table.device == GPU:
        address = found.table.data_ptr()
        DRIVER.work[address] = work
        weakref.finalize(found.table, DRIVER.work.pop, address, None)
    return found


def _add(address: int, count: int, numbers: list[int]) -> None:
    """Add digests to the one total, or each to its own."""
    totals = (ctypes.c_uint64 * count).from_address(address)
    for at, number in enumerate(numbers):
        at = at if count == len(numbers) else 0
        totals[at] = (totals[at] + number) % (1 << 64)


def _digested(regions: list[Region], logicals: Any, end: Any, shift: Shift) -> list[int]:
    found = zip(regions, logicals, strict=True)
    return [cpu.digest([_host(region, shift)], [_marks(logical, shift)], end) for region, logical in found]


def _marks(logical: Any, shift: Shift) -> Any:
    """The coordinates of a part of the lists."""
    positions = logical.listed[shift.units : shift.units + len(logical.positions)]
    return replace(logical, positions=positions, whole=None)


def _rows_prepared(real: Any) -> Any:
    @wraps(real)
    def prepared(work: Any, *rest: Any, **named: Any) -> Any:
        return _launched(real(work, *rest, **named), lambda part: _move(list(work), part[0]))

    return prepared


def _move(regions: list[Region], shift: Shift) -> None:
    cpu.move([_host(region, shift) for region in regions])


def _digest_prepared(real: Any) -> Any:
    @wraps(real)
    def prepare(
        regions: Any, logicals: Any, out: Any, config: Any = None, sms: Any = None, reads: Any = None, using: Any = None
    ) -> Any:
        def work(part: Part) -> None:
            shift, (total,) = part
            if reads is None:
                _move(regions, shift)
            _add(total, len(out), _digested(regions, logicals, reads or "src", shift))

        return _launched(real(regions, logicals, out, config, sms, reads, using), work)

    return prepare


def _convert(conversions: list[Conversion], shift: Shift) -> None:
    convert_reference.convert([_host(each, shift) for each in conversions])


def _convert_prepared(real: Any) -> Any:
    @wraps(real)
    def prepare(conversions: Any, *rest: Any, **named: Any) -> Any:
        done = list(conversions)
        return _launched(real(conversions, *rest, **named), lambda part: _convert(done, part[0]))

    return prepare


def _convert_and_digest_prepared(real: Any) -> Any:
    @wraps(real)
    def prepare(conversions: Any, logicals: Any, end: Any, out: Any, *rest: Any, **named: Any) -> Any:
        def work(part: Part) -> None:
            shift, (total,) = part
            _convert(conversions, shift)
            regions = [_host(each, shift).at(end) for each in conversions]
            _add(total, len(out), [cpu.digest(regions, [_marks(each, shift) for each in logicals], end)])

        return _launched(real(conversions, logicals, end, out, *rest, **named), work)

    return prepare


def _factory(make: Any) -> Any:
    @wraps(make)
    def made(*sizes: Any, device: Any = None, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if not is_gpu(device):
            return make(*sizes, **named) if device is None else make(*sizes, device=device, **named)
        if make is _PLAIN["zeros"] and isinstance(sizes[0], int) and sizes[0] >= LEAST_SHARED_BYTES:
            return _PLAIN["frombuffer"](allocate(sizes[0]), dtype=named["dtype"]).as_subclass(OnGpu)
        return make(*sizes, **named).as_subclass(OnGpu)

    return made


def _to(self: torch.Tensor, *words: Any, **named: Any) -> torch.Tensor:
    device = named.pop("device", None)
    if words and isinstance(words[0], (str, torch.device)):
        device, words = words[0], words[1:]
    copied = _TO(on_host(self), *words, **named)
    if device is None:
        return copied.as_subclass(type(self))
    return copied.clone().as_subclass(OnGpu) if is_gpu(device) else copied


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    found = _TENSOR_AT(address, nbytes, torch.device("cpu"))
    return found.as_subclass(OnGpu) if is_gpu(device) else found


@cache
def _loaded() -> Any:
    """NIXL's API, to which memory of the GPU is the host's, as it is."""
    api, made = _LOAD(), "__init__"
    real = getattr(api.nixl_agent, made)

    @wraps(real)
    def begin(self: Any, *words: Any, **named: Any) -> None:
        real(self, *words, **named)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    setattr(api.nixl_agent, made, begin)
    return api


def install(give: Callable[[Any, str, object], object] = setattr) -> None:
    """Give this process the GPU, for as long as it lives. `give`: another setattr, whose changes can be undone."""
    about = SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, L2_cache_size=50 << 20
    )
    for name in ("empty", "zeros", "ones", "full", "rand", "randint", "randn", "randperm", "arange", "tensor"):
        give(torch, name, _factory(getattr(torch, name)))
    given = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: about,
        "mem_get_info": lambda *_: (79 << 30, 80 << 30),
        "device": lambda *_: nullcontext(),
        "stream": lambda *_: nullcontext(),
        "current_stream": Stream,
        "default_stream": Stream,
        "Stream": Stream,
        "Event": Moment,
        "CUDAGraph": Graph,
        "graph": capture,
        **{name: lambda *_: None for name in ("synchronize", "set_device", "empty_cache", "init")},
    }
    for name, value in given.items():
        give(torch.cuda, name, value)
    of_tensors = {
        "cuda": lambda self, *_, **__: on_host(self).clone().as_subclass(OnGpu),
        "to": _to,
        "is_pinned": lambda self, *_: self.device != GPU,
        "pin_memory": lambda self, *_: self,
    }
    for name, value in of_tensors.items():
        give(torch.Tensor, name, value)
    give(cuda_driver, "library", lambda: DRIVER)
    for module, name in ((cuda_driver, "leave_captures_alone"), (releases, "wait_for")):
        give(module, name, lambda *_: None)
    give(device_tensor, "tensor_at", _tensor_at)
    for module in (launch, measured_code):
        give(module, "find", lambda name: Code(cubin(name.encode()), "kernel", 128, 0))
    give(rows, "prepared", _rows_prepared(rows.prepared))
    give(digest, "prepare", _digest_prepared(digest.prepare))
    give(convert, "prepare", _convert_prepared(convert.prepare))
    give(convert, "prepare_with_digest", _convert_and_digest_prepared(convert.prepare_with_digest))
    give(nixl_agent, "_load", _loaded)
