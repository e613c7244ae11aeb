"""The autotune sweep: every candidate that a GPU would run compiles as it should, on a machine without one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from kvmover.kernels import bulk, convert_reference, cuda_driver, launch, reference
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.cuda_driver import Function
from kvmover.kernels.launch import RowConfig, RowKind
from kvmover.kernels.region import Region
from perf import autotune, compile_sweep, conversions, copy_engines, gpu_time
from perf.autotune import BUDGETS, candidates
from perf.cases import CASES
from perf.compile_sweep import Verdict, compile_one, convert_one
from tests.counting_driver import CountingDriver


@pytest.mark.parametrize("sms", BUDGETS, ids=lambda sms: f"sms-{sms}")
def test_a_sweep_tries_the_rule_and_nothing_that_leaves_lanes_idle(sms: int | None) -> None:
    tried = list(candidates(sms))
    assert len(set(tried)) == len(tried) >= 10
    assert (RowConfig() if sms is None else RowConfig(32768, 8)) in tried
    assert all(config.block_bytes >= config.warps * 512 for config in tried)


def region(row_bytes: int = 256) -> Region:
    return compile_sweep.region(row_bytes, 64)


def test_an_entry_has_the_fastest_launch_and_a_launch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's times are made up here: the larger tiles are faster."""

    def interleaved(calls: Mapping[RowConfig, object], rounds: int) -> dict[RowConfig, SimpleNamespace]:
        return {call: SimpleNamespace(median=1 / call.block_bytes) for call in calls}

    monkeypatch.setattr(gpu_time, "interleaved", interleaved)
    monkeypatch.setattr(copy_engines, "same_bytes", lambda regions, truth, calls: None)
    read = launch._entry({"sms": 8, **json.loads(json.dumps(autotune.best([region()], 8)))})
    assert (read.config.block_bytes, read.kind, read.budgeted) == (131072, RowKind(256, 16384), True)


def test_a_candidate_that_spills_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_driver, "library", lambda: CountingDriver(spilled_bytes={2: 8}))
    kernel = SimpleNamespace(__name__="move_kernel")
    ready = {
        config: SimpleNamespace(function=Function(number, 128, 0), program=SimpleNamespace(kernel=kernel), run=number)
        for number, config in enumerate([RowConfig(2048, 1), RowConfig(4096, 2)], start=1)
    }
    assert autotune.swept(ready) == {RowConfig(2048, 1): 1}  # pyright: ignore[reportArgumentType]
    said = capsys.readouterr().out
    assert said == "left out: move_kernel with RowConfig(block_bytes=4096, warps=2) spills 8 bytes a thread\n"


def test_engines_that_cannot_move_a_case_or_not_in_time_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(bulk, "unavailable", lambda engine, device: None)
    assert [copy_engines.copies_of(engine, region()) for engine in (CopyEngine.BOXES, CopyEngine.COPY)] == [4, 256]
    assert copy_engines.left_out(CopyEngine.BOXES, [region()], device) is None
    assert copy_engines.left_out(CopyEngine.BULK, [region(132)], device) is not None
    assert copy_engines.left_out(CopyEngine.TENSOR, [region()], device) is None
    of_one = "256 B a run: rows follow each other at both ends, or a unit has one"
    assert copy_engines.left_out(CopyEngine.TENSOR, [compile_sweep.region(256, 1)], device) == of_one
    monkeypatch.setattr(copy_engines, "MOST_COPIES", 100)
    assert copy_engines.left_out(CopyEngine.COPY, [region()], device) == "256 copies"


@pytest.mark.filterwarnings("ignore")  # Triton's own
def test_the_dry_run_says_what_is_wrong_with_a_candidate() -> None:
    line, verdict = compile_one((256, 64, RowConfig(4096, 4), 90))
    assert verdict is Verdict.SWEPT
    assert line == "sm_90  256 B x 64   4 KiB  4 warps:  32 registers, [128] bit, 0 spills, 0 B shared"
    line, verdict = compile_one((256, 64, RowConfig(262144, 32), 90))
    assert verdict is Verdict.SPILLS
    assert " 0 spills" not in line


@pytest.mark.parametrize(("verdict", "wrong"), [(Verdict.SPILLS, 0), (Verdict.WRONG, 1)])
def test_the_dry_run_fails_for_what_is_wrong_and_not_for_what_is_left_out(
    verdict: Verdict, wrong: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pool:
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def map(self, call: object, jobs: list[object], chunksize: int) -> list[tuple[str, Verdict]]:
            return [("one", verdict), ("other", Verdict.SWEPT)] if call is compile_one else []

    monkeypatch.setattr(compile_sweep, "ProcessPoolExecutor", Pool)
    assert compile_sweep.compile_all([RowConfig()], [RowConfig()]) == wrong
    *lines, last = capsys.readouterr().out.splitlines()
    assert f"one{verdict}" in lines
    assert last == f"2 candidates compiled, {1 - wrong} left out because they spill, {wrong} not as they should be"


@pytest.mark.filterwarnings("ignore")  # Triton's own
def test_the_dry_run_compiles_conversions_too() -> None:
    line, verdict = convert_one((128, "to", RowConfig(4096, 4), 90))
    assert verdict is Verdict.SWEPT
    assert line.startswith("sm_90   to 128 float8_e4m3fn")
    assert "0 spills" in line


@pytest.mark.filterwarnings("ignore")
def test_what_is_left_of_whole_units_may_be_narrower_than_the_rest() -> None:
    line, verdict = compile_one((2048, 9, RowConfig(32768, 16), 90))
    assert verdict is Verdict.SWEPT
    assert "[64, 128] bit" in line


def test_a_conversion_is_the_gather_of_a_case_in_another_form_and_back() -> None:
    plain, narrow = conversions.forms(128)
    wide = compile_sweep.region(256, 64)
    pool, packed = wide.src.memory[0], wide.dst.memory[0]
    pool.copy_((torch.randn(len(pool) // 2) * 3).bfloat16().view(torch.uint8))
    there = conversions.conversion(wide, 128)
    convert_reference.convert([there])
    reference.move([wide])
    rows = packed.view(-1, 256)[: wide.units * 64]
    assert torch.equal(
        there.dst.memory[0].view(-1, 128)[: len(rows)],
        convert_reference.encode(narrow, convert_reference.decode(plain, rows, []), [conversions.SCALE]).view(-1, 128),
    )
    convert_reference.convert([conversions.back(there)])
    reference.move([wide])
    assert torch.equal(
        packed.view(-1, 256)[: len(rows)].view(torch.bfloat16).float(),
        convert_reference.decode(narrow, there.dst.memory[0].view(-1, 128)[: len(rows)], [conversions.SCALE]),
    )


def test_an_entry_of_a_conversion_is_read_as_one_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(calls: Mapping[RowConfig, object], rounds: int) -> dict[RowConfig, SimpleNamespace]:
        return {config: SimpleNamespace(median=1e-6 * config.warps) for config in calls}

    compared: list[int] = []
    monkeypatch.setattr(gpu_time, "interleaved", interleaved)
    monkeypatch.setattr(copy_engines, "same_bytes", lambda regions, truth, calls: compared.append(len(calls)))
    there = conversions.conversion(region(), 128)
    for sms in BUDGETS:
        entry = autotune.best_conversion([there], sms)
        tried = {RowConfig(*line[:2]) for line in entry["table"]}  # pyright: ignore
        assert launch.RULES[launch.Kernel.CONVERT][sms is not None] in tried
        assert compared[-1] == len(tried) >= 10
        read = launch._entry({"sms": sms, **json.loads(json.dumps(entry))})
        assert (read.kernel, read.kind, read.budgeted) == (launch.Kernel.CONVERT, RowKind(256, 16384), sms is not None)
        assert read.config.warps == min(config.warps for config in tried)


def test_a_case_is_done_when_its_last_kernel_is() -> None:
    llama, keys = CASES[0], CASES[-1]
    digests = [{"case": case.text(), "kernel": "digest"} for case in (llama, keys)]
    assert (autotune.is_converted(llama), autotune.is_converted(keys)) == (True, False)
    assert (autotune.is_done(llama, digests), autotune.is_done(keys, digests)) == (False, True)
    assert autotune.is_done(llama, [*digests, {"case": llama.text(), "kernel": "convert"}])
