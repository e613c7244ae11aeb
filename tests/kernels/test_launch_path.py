"""A launch is one call of the driver: its code is loaded and its ring pinned when a peer is seated, not in a poll."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from convert_cases import CASES, OpenCase, coordinates
from triton.backends.compiler import GPUTarget

from kvmover.kernels import ahead_of_time, code_store, convert, cuda_driver, digest, launch, rows
from kvmover.kernels.ahead_of_time import CompileError, Worker
from kvmover.kernels.code_store import Code
from kvmover.kernels.digest_reference import Logical
from kvmover.kernels.launch import Prepared, Program, RowConfig, Shift
from kvmover.kernels.region import Region, RegionError, Side
from kvmover.kernels.table import Launch
from tests.counting_driver import CountingDriver

GPU, STREAM, TABLE = torch.device("cuda", 0), 77, 1 << 40
KERNELS: tuple[Any, ...] = (
    rows.move_kernel,
    digest.digest_kernel,
    convert.convert_kernel,
    convert.convert_and_digest_kernel,
)
LOADED = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CountingDriver]:
    """Triton compiles for an H100 that is not there, and no code is kept; tables are at TABLE."""
    found, target = CountingDriver(), GPUTarget("cuda", 90, 32)
    active = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    table = SimpleNamespace(device=GPU, data_ptr=lambda: TABLE)
    monkeypatch.setattr(cuda_driver, "library", lambda: found)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(launch, "on", lambda device: nullcontext())
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch, "architecture", lambda device: 90)
    monkeypatch.setattr(code_store, "folder", lambda: tmp_path)
    monkeypatch.setattr(launch.Upload, "here", lambda device: SimpleNamespace(to_device=lambda words: table))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    for kernel in KERNELS:
        kernel.device_caches.clear()
    yield found
    for kernel in KERNELS:
        kernel.device_caches.clear()


def region() -> Region:
    """Two units of 64 rows of 256 bytes."""
    memory = torch.zeros(2 * 64 * 256, dtype=torch.uint8), torch.zeros(2 * 64 * 256, dtype=torch.uint8)
    planes, units = np.zeros(1, np.int64), np.array([0, 64 * 256])
    src, dst = (Side.of((each,), planes, planes, units, 0, 256) for each in memory)
    return Region(src, dst, 1, 64, 256)


def launches() -> dict[str, tuple[Program, Launch]]:
    """A launch of each kernel, for a GPU."""
    config = RowConfig()
    moved = rows.describe([region()], config.block_bytes)
    logical = Logical(np.zeros(1, np.int64), np.array([0, 64]))
    digested = digest.describe([region()], [logical], [0], config.block_bytes)
    conversion = OpenCase(CASES[0]).conversion
    converted = convert.describe([conversion], config.block_bytes)
    marks = [coordinates(CASES[0], conversion)]
    both = convert.describe([conversion], config.block_bytes, (), (marks, "dst"))
    casts = ("CASTS", 1), ("enable_fp_fusion", False)
    return {
        "rows": (rows.program(moved.shapes, config), moved),
        "digest": (digest.program(digested.shapes, config, None), digested),
        "convert": (Program(convert.convert_kernel, converted.shapes, config, casts), converted),
        "convert and digest": (convert.program(both.shapes, config, torch.device("cpu"), "dst"), both),
    }


def parameters(program: Program) -> tuple[int, ...]:
    """The bytes of each parameter of the compiled kernel, by its PTX."""
    ptx = program.kernel.warmup(*program.arguments, grid=(1,), **program.options).asm["ptx"]
    entry = ptx[ptx.index(".entry") :]
    return tuple(int(bits) // 8 for bits in re.findall(r"\.param \.u(\d+)", entry[: entry.index(")")]))


@pytest.mark.filterwarnings("ignore")  # Triton's own
@pytest.mark.parametrize("name", ["rows", "digest", "convert", "convert and digest"])
def test_after_its_code_is_loaded_a_launch_is_one_call_with_the_kernels_parameters(
    name: str, driver: CountingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here, where vLLM hangs a hook on every compile, which writes what is compiled in as JSON."""
    written: list[Any] = []

    def hook(**told: Any) -> None:
        written.append(json.loads(told["compile"]["specialization_data"]))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    program, laid = launches()[name]
    function = program.function(GPU)
    assert len(written) == 1
    assert driver.calls == LOADED
    driver.parameters, outs = parameters(program), [torch.zeros(1, dtype=torch.int64)] * program.outputs
    ready = Prepared.of(program, laid, GPU, None, *outs)
    assert driver.calls == LOADED
    others = [torch.zeros(1, dtype=torch.int64) for _ in outs]
    ready.run()
    ready.run(Shift(16, 1 << 40, -(1 << 40)), *others)
    ready.run()
    assert driver.calls == [*LOADED, *["cuLaunchKernel"] * 3]
    shape = (laid.tiles, 1, 1, 32 * program.config.warps, 1, 1, function.shared_bytes)
    plain = (TABLE, *(out.data_ptr() for out in outs), laid.regions, laid.tiles, 0, 0, 0, 0, 0)
    counts = laid.regions, laid.tiles, 16, 1 << 40, (1 << 64) - (1 << 40), 0, 0
    shifted = (TABLE, *(out.data_ptr() for out in others), *counts)
    given = plain, shifted, plain
    assert driver.launched == [(function.handle, shape, STREAM, values) for values in given]


@pytest.mark.filterwarnings("ignore")
def test_code_is_loaded_once_on_each_device_for_equal_programs(driver: CountingDriver) -> None:
    first, second = (launches()["rows"][0] for _ in range(2))
    assert first is not second
    assert first.function(GPU) is second.function(GPU)
    assert driver.calls == LOADED
    other = second.function(torch.device("cuda", 1))
    assert driver.calls == LOADED * 2
    assert other.handle != first.function(GPU).handle


class Compiled:
    """A kernel that Triton has compiled, of 4 warps."""

    def __init__(self, scratch_bytes: int = 0, shared_bytes: int = 0) -> None:
        sizes = {"global_scratch_size": scratch_bytes, "profile_scratch_size": 0, "shared": shared_bytes}
        self.name, self.__name__, self.asm = "kernel", "kernel", {"cubin": b"kernel"}
        self.metadata = SimpleNamespace(**sizes, num_warps=4, target=GPUTarget("cuda", 90, 32))

    def warmup(self, *given: object, **options: object) -> Compiled:
        return self


def test_a_kernel_that_shares_more_than_48_kib_asks_for_it(driver: CountingDriver) -> None:
    function = Program(Compiled(shared_bytes=64 << 10), (), RowConfig()).function(GPU)
    assert driver.calls == [*LOADED, "cuFuncSetAttribute 8 65536"]
    assert (function.threads, function.shared_bytes) == (128, 64 << 10)


def test_a_kernel_that_needs_scratch_memory_is_refused(driver: CountingDriver) -> None:
    with pytest.raises(RegionError, match="kernel was compiled to write a profile"):
        Program(Compiled(scratch_bytes=8), (), RowConfig()).function(GPU)
    assert driver.calls == []


def test_a_driver_that_refuses_code_is_named_with_it(driver: CountingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingDriver, "cuModuleLoadData", lambda self, module, cubin: 209)
    with pytest.raises(cuda_driver.CudaError, match="cuModuleLoadData of kernel failed with CUDA error 209"):
        Program(Compiled(), (), RowConfig()).function(GPU)


def compiled_here() -> int:
    """The kernels that Triton has compiled in this process since the test began."""
    return sum(len(kernel.device_caches[0][0]) for kernel in KERNELS if 0 in kernel.device_caches)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Worker]:
    """A compiling process whose cache nobody has used before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(code_store, "folder", lambda: tmp_path / "kvmover")
    found = Worker()
    yield found
    found.rest()


@pytest.mark.filterwarnings("ignore")
def test_a_process_compiles_and_this_one_only_loads(driver: CountingDriver, worker: Worker) -> None:
    programs = [program for program, _ in launches().values()]
    functions = [program.function(GPU, worker.compile) for program in programs]
    assert compiled_here() == 0
    assert driver.calls == LOADED * len(programs)
    assert [function.threads for function in functions] == [32 * program.config.warps for program in programs]
    launch._functions.clear()  # as in the next process, for which nothing is compiled anywhere
    worker.rest()
    assert [program.function(GPU, None).threads for program in programs]  # pyright: ignore[reportArgumentType]
    assert driver.loaded[len(programs) :] == driver.loaded[: len(programs)]


def test_words_of_a_process_that_cannot_compile_are_told_and_the_next_begins_anew(
    driver: CountingDriver, worker: Worker
) -> None:
    program, _ = launches()["rows"]
    wrong = replace(program, constants=())
    with pytest.raises(CompileError, match=r"move_kernel was not compiled: .*Error: "):
        worker.compile(wrong, 90)
    assert worker.compile(program, 90).name == "move_kernel"


def test_a_process_that_ends_is_told(worker: Worker, driver: CountingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time.sys, "executable", "/bin/false")
    with pytest.raises(CompileError, match="its process ended"):
        worker.compile(launches()["rows"][0], 90)


def test_code_is_kept_whole_or_compiled_again(
    driver: CountingDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = Code(b"machine\ncode", "kernel", 128, 7)
    assert code_store.find("name") is None
    code_store.keep("name", code, code_store.folder())
    assert code_store.find("name") == code
    assert [file.name for file in tmp_path.iterdir()] == ["name"]
    written = (tmp_path / "name").read_bytes()
    for at in (0, 70, len(written) - 1):
        damaged = bytearray(written)
        damaged[at] ^= 1
        (tmp_path / "name").write_bytes(damaged)
        assert code_store.find("name") is None
        assert "is damaged: its kernel is compiled again" in caplog.text
        caplog.clear()
    for cut in (0, 63, len(written) - 1):
        (tmp_path / "name").write_bytes(written[:cut])
        assert code_store.find("name") is None


def test_code_has_another_name_for_whatever_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton's version what is compiled here depends, and not what a wheel brings."""
    kernel = Compiled()
    programs = [
        Program(kernel, (), RowConfig()),
        Program(kernel, ((1, 2),), RowConfig()),
        Program(kernel, (), RowConfig(warps=8)),
        Program(kernel, (), RowConfig(), (("COPY", 1),)),
        Program(kernel, (), RowConfig(), outputs=1),
        Program(rows.move_kernel, (), RowConfig()),
    ]
    names = [name(program, 90) for program in programs for name in (Program.code_name, Program.shipped_name)]
    names += [programs[0].code_name(100), programs[0].shipped_name(100)]
    monkeypatch.setattr(triton, "__version__", "another")
    names.append(programs[0].code_name(90))
    assert programs[0].shipped_name(90) == names[1]
    monkeypatch.setattr(launch, "source", lambda: "another")
    names += [programs[0].code_name(90), programs[0].shipped_name(90)]
    assert len(set(names)) == len(names) == 17


def test_names_do_not_depend_on_what_triton_has_hashed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.JITFunction, "cache_key", property(lambda self: pytest.fail("by Triton's hash")))
    assert launches()["rows"][0].code_name(90).startswith("sm_90-")


def test_every_file_of_device_code_counts_as_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in Path(code_store.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(code_store, "_HERE", tmp_path)
    source = code_store.source.__wrapped__
    assert source() == code_store.source()
    names = {source()}
    for name in ("rows.py", "table.py", "digest_reference.py", "convert_elements.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        names.add(source())
    assert len(names) == 5


@pytest.fixture
def shipped(driver: CountingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program whose code a wheel brought, of another Triton; nothing is compiled here."""
    monkeypatch.setattr(code_store, "SHIPPED", tmp_path / "shipped")
    program = launches()["rows"][0]
    code_store.keep(
        program.shipped_name(90), Code(b"kernel of a wheel", "kernel", 256, 0, "Triton 3.0"), code_store.SHIPPED
    )
    return program


def refuse(program: Program, architecture: int) -> Code:
    raise AssertionError("a kernel was compiled")


def compile_here(program: Program, architecture: int) -> Code:
    return Code(b"kernel of here", "kernel", 256, 0)


def test_code_of_the_wheel_is_loaded_and_nothing_is_compiled(shipped: Program, driver: CountingDriver) -> None:
    found = shipped.function(GPU, refuse)
    assert driver.loaded == [b"kernel of a wheel"]
    assert shipped.kept_function(GPU) is found
    assert driver.calls == LOADED


def test_code_compiled_here_goes_before_the_wheels(shipped: Program, driver: CountingDriver) -> None:
    code_store.keep(shipped.code_name(90), compile_here(shipped, 90), code_store.folder())
    shipped.function(GPU, refuse)
    assert driver.loaded == [b"kernel of here"]


@pytest.mark.parametrize("changed", ["source", "architecture", "constants"])
def test_what_the_wheel_was_not_compiled_for_is_compiled(
    changed: str, shipped: Program, driver: CountingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed == "source":
        monkeypatch.setattr(launch, "source", lambda: "of a changed file")
    if changed == "architecture":
        monkeypatch.setattr(launch, "architecture", lambda device: 103)
    program = replace(shipped, config=RowConfig(warps=8)) if changed == "constants" else shipped
    assert program.kept_function(GPU) is None
    program.function(GPU, compile_here)
    assert driver.loaded == [b"kernel of here"]


def test_code_of_the_wheel_that_the_driver_refuses_is_compiled_and_told(
    shipped: Program, driver: CountingDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a driver does that is older than the compiler."""
    load = CountingDriver.cuModuleLoadData

    def newer(self: CountingDriver, module: Any, cubin: bytes) -> int:
        return 222 if b"wheel" in cubin else load(self, module, cubin)

    monkeypatch.setattr(CountingDriver, "cuModuleLoadData", newer)
    assert shipped.kept_function(GPU) is None
    assert "CUDA error 222: the wheel's code, of Triton 3.0, is compiled again" in caplog.text
    shipped.function(GPU, compile_here)
    assert driver.loaded == [b"kernel of here"]


def test_damaged_code_of_the_wheel_is_compiled(
    shipped: Program, driver: CountingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    file = code_store.SHIPPED / shipped.shipped_name(90)
    file.write_bytes(file.read_bytes()[:-1])
    shipped.function(GPU, compile_here)
    assert driver.loaded == [b"kernel of here"]
    assert "is damaged" in caplog.text
