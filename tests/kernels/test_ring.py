"""The bulk kernel without a GPU: its table against memory moved by it, and its source compiled by NVRTC."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bulk_cases import ALIGNED, AT, MEMORY, OPENED, Locate, any_moves, emulate, line, locate
from hypothesis import given, settings
from hypothesis import strategies as st
from row_moves import HND, NHD, TOGETHER, Move, PoolShape, ids, run

from kvmover.kernels import bulk, cuda_driver, experimental
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.experimental import RING, Ring
from kvmover.kernels.region import Region, RegionError, Side, merged
from kvmover.kernels.table import Launch
from perf.machine_code import CUOBJDUMP, MachineCode, read
from tests.counting_driver import CountingDriver
from tests.proofs import family

#: Shared memory of an SM on sm_90 and sm_100. A block takes 1 KiB of it for the system, which its size includes.
SHARED_BYTES = 228 << 10


@pytest.mark.parametrize("move", ALIGNED, ids=ids(ALIGNED))
def test_the_table_moves_every_byte_once(move: Move, how: Locate) -> None:
    run([move], partial(emulate, how=how))


@pytest.mark.parametrize("blocks", family([1, 2, 7], few=[2]))
def test_regions_of_different_runs_share_a_launch(blocks: int, how: Locate) -> None:
    several = [move for moves in TOGETHER.values() for move in moves if move in ALIGNED]
    run(several, partial(emulate, how=how, blocks=blocks))


@pytest.mark.parametrize(
    "shape",
    family([Ring(2, 128, 1), Ring(4, 4096, 2), RING], few=[Ring(4, 4096, 2)]),
    ids=lambda shape: f"{shape.stage_bytes}B",
)
def test_any_ring_moves_the_same_bytes(shape: Ring) -> None:
    run(ALIGNED[::3], partial(emulate, how=locate, shape=shape))


def test_rows_off_a_16_byte_border_are_refused() -> None:
    refused = [region for region in OPENED if region.nbytes and merged(region).alignment() < 16]
    assert len(refused) > 20
    for region in refused:
        with pytest.raises(RegionError, match="multiples of 16"):
            experimental.describe([region])


@settings(max_examples=60)
@given(move=any_moves().filter(lambda move: move.row_bytes % 16 == 0))
def test_any_move_of_aligned_rows_lands_by_the_table(move: Move) -> None:
    run([move], partial(emulate, how=locate))


@settings(max_examples=60)
@given(
    run_bytes=st.integers(1, 1 << 17).map(lambda words: words * 16),
    units=st.integers(1, 9),
    stage=st.sampled_from([128, 1024, 32 << 10]),
)
def test_a_run_is_cut_into_pieces_that_cover_it_once(run_bytes: int, units: int, stage: int) -> None:
    run_bytes = min(run_bytes, 60 * stage)
    src, dst = line(run_bytes, np.arange(units) * 2 * run_bytes), line(run_bytes, np.arange(units) * 3 * run_bytes)
    launch = experimental.describe([Region(src, dst, 1, 1, run_bytes)], Ring(stage_bytes=stage))
    slot, base = int(launch.table[AT.PIECE_BYTES]), MEMORY.data_ptr()
    per_item = int(launch.table[AT.PER_ITEM])
    assert 0 < slot * per_item <= stage
    assert slot % 128 == 0
    for side, apart in ((AT.SRC, 2), (AT.DST, 3)):
        pieces = [locate(launch.table, 0, item, lane, side) for item in range(launch.tiles) for lane in range(per_item)]
        pieces = [(address - base, nbytes) for address, nbytes, _ in pieces if nbytes]
        starts = [unit * apart * run_bytes for unit in range(units)]
        assert sum(nbytes for _, nbytes in pieces) == units * run_bytes
        ends = {address + nbytes for address, nbytes in pieces}
        assert all(address in starts or address in ends for address, _ in pieces)
        assert len({address for address, _ in pieces}) == len(pieces)


def test_a_run_that_almost_fits_wastes_no_stage_on_its_rest() -> None:
    launch = experimental.describe([Region(line(33 << 10, [0]), line(33 << 10, [0]), 1, 1, 33 << 10)])
    assert launch.table[AT.PIECE_BYTES] == 33 << 9
    assert launch.tiles == 2


def test_the_table_is_some_words_a_region_and_one_a_plane_and_unit() -> None:
    region = Move(PoolShape(NHD, 64, 8), PoolShape(HND, 64, 8), 256, 64, heads=8, layers=6, units=9).open().region
    assert len(experimental.describe([region]).table) == AT.WORDS + 2 * (6 * 2 + 9)


def test_more_pieces_than_32_bits_count_are_refused() -> None:
    planes, units = np.zeros(1 << 16, np.int64), np.arange(1 << 15) * 8192
    side = Side.of((MEMORY,), planes, planes, units, 0, 0)
    with pytest.raises(RegionError, match=f"{1 << 31} pieces"):
        experimental.describe([Region(side, side, 1, 1, 4096)])


def test_a_ring_that_a_machine_lacks_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device, reason = torch.device("cuda", 0), bulk.unavailable.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert reason(CopyEngine.BULK, device) == "cuda:0 is sm_89, bulk copies came with sm_90"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert reason(CopyEngine.BULK, device) == "CuPy is not installed"


def test_a_cupy_that_cannot_compile_is_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CuPy of another CUDA, or without NVRTC, is there, and raises when it compiles."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda _: nullcontext())))
    reason = bulk.unavailable.__wrapped__(CopyEngine.BULK, torch.device("cuda", 0))
    assert str(reason).startswith("CuPy cannot compile bulk.cu: AttributeError: ")
    experimental.kernel.cache_clear()


def test_a_launch_hands_over_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, table = (
        CountingDriver(parameters=(8, 4)),
        SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: 1 << 47),
    )
    found = SimpleNamespace(kernel=SimpleNamespace(ptr=5))
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    monkeypatch.setattr(experimental, "on", lambda device: nullcontext())
    monkeypatch.setattr(experimental, "kernel", lambda device, ring: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    experimental.run(Launch(np.zeros(1, np.int64), 1, 1, 3, (RING,)), table, 4)  # pyright: ignore[reportArgumentType]
    assert driver.launched == [(5, (3, 1, 1, experimental.THREADS, 1, 1, RING.nbytes), 77, (1 << 47, 3))]


# The CUDA source, compiled by NVRTC, which needs no GPU and no driver.


def nvrtc() -> ctypes.CDLL | None:
    """The library of the nvidia-cuda-nvrtc wheel, or of torch's."""
    spec = importlib.util.find_spec("nvidia")
    found = [
        path
        for place in (spec and spec.submodule_search_locations) or []
        for path in sorted(Path(place).glob("*/lib/libnvrtc.so.*"))
    ]
    if not found:
        return None
    for builtins in found[-1].parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins))  # some versions look for it on the library path only
    return ctypes.CDLL(str(found[-1]))


def compiled(library: ctypes.CDLL, architecture: int, options: Sequence[str]) -> bytes:
    """The cubin of bulk.cu."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = experimental.SOURCE.read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"bulk.cu", 0, None, None) == 0
    words = [f"--gpu-architecture=sm_{architecture}", *options]
    result = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*map(str.encode, words)))

    def read(what: str) -> bytes:
        assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.raw

    assert result == 0, read("ProgramLog").decode()
    return read("CUBIN")


@pytest.fixture(scope="module", params=[90, 100], ids=lambda architecture: f"sm_{architecture}")
def machine_code(request: pytest.FixtureRequest) -> MachineCode:
    library = nvrtc()
    if library is None:
        pytest.skip("NVRTC is not installed (nvidia-cuda-nvrtc)")
    if not CUOBJDUMP.exists():
        pytest.skip(f"this Triton has no {CUOBJDUMP.name}")
    return read(compiled(library, request.param, RING.options))


def test_the_payload_moves_by_bulk_and_tensor_copies_alone(machine_code: MachineCode) -> None:
    opcodes = machine_code.opcodes
    assert opcodes["UBLKCP.S.G"] == opcodes["UBLKCP.G.S"] == 1
    assert opcodes["UTMALDG.2D"] == opcodes["UTMASTG.2D"] == 1
    kinds = {opcode.split(".")[0] for opcode in opcodes}
    assert not kinds & {"STG", "ST", "LDS", "STS", "LDSM"}, "payload through registers"
    assert "CALL" not in kinds


def test_the_kernel_needs_few_registers_and_no_local_memory(machine_code: MachineCode) -> None:
    assert (machine_code.local_bytes, machine_code.stack_bytes, machine_code.spills) == (0, 0, 0)
    assert 0 < machine_code.registers <= 64
    assert machine_code.shared_bytes + RING.nbytes <= SHARED_BYTES
    assert 2 * RING.nbytes > SHARED_BYTES, "two blocks would share an SM, and the budget would not be spent"


def test_a_ring_that_would_wait_for_itself_does_not_compile() -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("NVRTC is not installed (nvidia-cuda-nvrtc)")
    with pytest.raises(AssertionError, match="a store waits for a stage"):
        compiled(library, 90, Ring(stages=2, lag=2).options)
