"""The launch configuration: measured tables that can be read, the nearest entry of them, and the rule without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvmover.kernels import launch
from kvmover.kernels.launch import RULES, TUNED, Kernel, RowConfig, RowKind, Tuned, choose, device_key, tuned

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Tuned, ...]]:
    """A GPU with three measured entries."""
    entries = (
        Tuned(RowKind(256, 16384), False, RowConfig(2048, 2)),
        Tuned(RowKind(256, 256), False, RowConfig(4096, 2)),
        Tuned(RowKind(256, 16384), True, RowConfig(32768, 8)),
        Tuned(RowKind(2048, 73728), True, RowConfig(65536, 16)),
        Tuned(RowKind(256, 16384), True, RowConfig(65536, 16), Kernel.DIGEST),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(launch, "tuned", lambda key: entries if key == "nvidia-test" else ())
    choose.cache_clear()
    yield entries
    choose.cache_clear()


def test_the_nearest_measured_kind_of_the_same_budget_is_taken(table: tuple[Tuned, ...]) -> None:
    assert choose(RowKind(256, 8192), None, GPU) == RowConfig(2048, 2)
    assert choose(RowKind(1152, 1152), None, GPU) == RowConfig(4096, 2)
    assert choose(RowKind(256, 256), 8, GPU) == RowConfig(32768, 8)
    assert choose(RowKind(2048, 65536), 8, GPU) == RowConfig(65536, 16)


@pytest.mark.parametrize("name", ["NVIDIA Test MIG 3g.71gb", "NVIDIA Superchip", "NVIDIA Superchip MIG 1g.18gb"])
def test_a_part_of_a_gpu_and_a_superchip_take_the_table_of_their_gpu(
    name: str, table: tuple[Tuned, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setitem(launch._SAME_GPU, "nvidia-superchip", "nvidia-test")
    choose.cache_clear()
    assert choose(RowKind(256, 8192), None, GPU) == RowConfig(2048, 2)


def test_each_kernel_has_entries_of_its_own_and_else_the_rule(table: tuple[Tuned, ...]) -> None:
    assert choose(RowKind(256, 256), 8, GPU, Kernel.DIGEST) == RowConfig(65536, 16)
    assert choose(RowKind(256, 256), None, GPU, Kernel.DIGEST) == RULES[Kernel.DIGEST][0]


def test_a_table_may_name_kernels_and_an_older_one_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"kind": [256, 16384], "sms": 8, "best": [32768, 8]}
    path = tmp_path / "nvidia-new.json"
    path.write_text(json.dumps({"entries": [old, old | {"kernel": "digest"}]}))
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    assert [each.kernel for each in tuned("nvidia-new")] == [Kernel.ROWS, Kernel.DIGEST]
    path.write_text(json.dumps({"entries": [old | {"kernel": "warp drive"}]}))
    tuned.cache_clear()
    with pytest.raises(ValueError, match="warp drive"):
        tuned("nvidia-new")


def test_without_a_table_the_rule_depends_on_the_budget_alone() -> None:
    kinds = [RowKind(2, 2), RowKind(2048, 1 << 20)]
    for kernel, (free, budgeted) in RULES.items():
        assert {choose(kind, None, CPU, kernel) for kind in kinds} == {free}
        assert {choose(kind, 4, CPU, kernel) for kind in kinds} == {budgeted}
    assert RULES[Kernel.ROWS][0] == RowConfig()


def test_a_gpu_that_was_never_tuned_has_no_table() -> None:
    assert tuned(device_key("NVIDIA Nothing")) == ()


@pytest.mark.parametrize("path", sorted(TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_names_its_hardware_and_its_best_is_its_fastest(path: Path) -> None:
    written = json.loads(path.read_text())
    assert device_key(written["about"]["hardware"].split(";")[0]) == path.stem
    assert len(tuned(path.stem)) == len(written["entries"]) > 0
    for entry in written["entries"]:
        rates = [row[-1] for row in entry["table"]]
        assert rates == sorted(rates, reverse=True)
        assert entry["table"][0] == [*entry["best"], entry["gb_per_s"]]
        assert {"block_bytes", "warps", "gb_per_s"} == set(written["columns"])
