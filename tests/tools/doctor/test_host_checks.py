"""The doctor's checks of the host: each problem is named with its remedy, on a made-up host that has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover import cli
from kvmover.tools.doctor import examination, host_checks, process_checks
from kvmover.tools.doctor.process_checks import Finding, Status
from tests.transport.sys_tree import sys_tree

Files = Mapping[str, str | bytes]
Check = Callable[[Path], Iterator[Finding]]


def made(root: Path, files: Files) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def config(acs_control: int | None, before: int = 2) -> bytes:
    """A bridge's configuration space: `before` other capabilities, then ACS, if it has it."""
    space = bytearray(4096)
    ids = [0x0001, 0x0019, 0x0026][:before] + ([0x000D] if acs_control is not None else [])
    for place, id_ in enumerate(ids):
        at = 0x100 + 0x40 * place
        following = at + 0x40 if place + 1 < len(ids) else 0
        space[at : at + 4] = (following << 20 | 1 << 16 | id_).to_bytes(4, "little")
        if id_ == 0x000D:
            space[at + 6 : at + 8] = (acs_control or 0).to_bytes(2, "little")
    return bytes(space)


GPU = {"dev/nvidia0": ""}
NIC = {"sys/class/infiniband/mlx5_0/node_type": "1: CA"}
BOTH = {**GPU, **NIC}
BRIDGE = "sys/bus/pci/devices/0000:00:01.0"
KERNEL = "sys/kernel"
CLOCK = "sys/devices/system/clocksource/clocksource0/current_clocksource"
THP = "sys/kernel/mm/transparent_hugepage"

#: Check, files of the host, what is found (None: nothing), in the detail, in the remedy.
CASES: list[tuple[Check, Files, Status | None, str, str]] = [
    (host_checks.storage_to_gpu, {}, None, "", ""),
    (host_checks.storage_to_gpu, GPU, Status.MISSING, "no nvidia-fs", "modprobe nvidia-fs"),
    (host_checks.storage_to_gpu, {**GPU, "proc/driver/nvidia-fs/version": "version: 2.24\n"}, Status.OK, "2.24", ""),
    (host_checks.peer_memory, GPU, None, "", ""),
    (host_checks.peer_memory, NIC, None, "", ""),
    (host_checks.peer_memory, BOTH, Status.PROBLEM, "neither peermem nor dma-buf", "modprobe nvidia-peermem"),
    (host_checks.peer_memory, {**BOTH, "sys/module/nvidia_peermem/refcnt": "1"}, Status.OK, "nvidia_peermem", ""),
    (
        host_checks.peer_memory,
        {**BOTH, "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580"},
        Status.OK,
        "dma-buf",
        "",
    ),
    (host_checks.iommu, {}, Status.OK, "off, or not visible", ""),
    (host_checks.iommu, {f"{KERNEL}/iommu_groups/0/type": "identity\n"}, Status.OK, "identity", ""),
    (host_checks.iommu, {f"{KERNEL}/iommu_groups/0/type": "DMA-FQ\n"}, Status.MISSING, "translates (DMA-FQ)", ""),
    (
        host_checks.iommu,
        {**BOTH, f"{KERNEL}/iommu_groups/3/type": "DMA\n"},
        Status.PROBLEM,
        "translates (DMA)",
        "iommu=pt",
    ),
    (host_checks.acs, {f"{BRIDGE}/class": "0x060400", f"{BRIDGE}/config": config(0b1100)}, None, "", ""),
    (
        host_checks.acs,
        {**BOTH, f"{BRIDGE}/class": "0x060400\n", f"{BRIDGE}/config": config(0b11101)},
        Status.PROBLEM,
        "1 of 1 bridges send peer traffic to the root complex: 0000:00:01.0",
        "setpci",
    ),
    (
        host_checks.acs,
        {**BOTH, f"{BRIDGE}/class": "0x060400\n", f"{BRIDGE}/config": config(0b1100)[:64]},
        Status.MISSING,
        "1 of 1 bridges do not show",
        "as root",
    ),
    (
        host_checks.acs,
        {**BOTH, f"{BRIDGE}/class": "0x060400", f"{BRIDGE}/config": config(0)},
        Status.OK,
        "off on 1",
        "",
    ),
    (host_checks.acs, {**BOTH, f"{BRIDGE}/class": "0x030200", f"{BRIDGE}/config": config(0b1100)}, None, "", ""),
    (host_checks.clock, {}, Status.OK, "unknown", ""),
    (host_checks.clock, {CLOCK: "tsc\n"}, Status.OK, "tsc", ""),
    (host_checks.clock, {CLOCK: "hpet\n"}, Status.PROBLEM, "hpet", "clocksource=tsc"),
    (host_checks.huge_pages, {}, Status.OK, "unknown", ""),
    (host_checks.huge_pages, {f"{THP}/enabled": "always [madvise] never"}, Status.OK, "madvise", ""),
    (host_checks.huge_pages, {f"{THP}/enabled": "always madvise [never]"}, Status.MISSING, "never", "echo madvise"),
]


@pytest.mark.parametrize(
    ("check", "files", "status", "detail", "remedy"),
    CASES,
    ids=[f"{i} {case[0].__name__}" for i, case in enumerate(CASES)],
)
def test_a_host_is_found_to_be_as_it_was_made(
    tmp_path: Path, check: Check, files: Files, status: Status | None, detail: str, remedy: str
) -> None:
    found = list(check(made(tmp_path, files)))
    assert [each.status for each in found] == ([] if status is None else [status])
    for each in found:
        assert detail in each.detail
        assert remedy in each.remedy
        assert bool(each.remedy) == bool(remedy)


def test_the_nic_of_each_gpu_is_said_and_a_variable_that_gives_them_all_one_is_a_problem(tmp_path: Path) -> None:
    root, said = sys_tree(tmp_path), "0000:1a:00.0 mlx5_0:1 (PIX); 0000:9a:00.0 mlx5_2:1 (PIX)"
    found = {
        given: next(host_checks.near_nics(root, {"UCX_NET_DEVICES": given} if given else {}))
        for given in ("", "mlx5_0:1", "mlx5_2:1,eth0", "mlx5_0:1,mlx5_2:1", "all", "^mlx5_3:1")
    }
    assert found[""] == Finding("nic a gpu", Status.OK, said)
    for one in ("mlx5_0:1", "mlx5_2:1,eth0"):
        assert (found[one].status, said in found[one].detail) == (Status.PROBLEM, True)
        assert "unset UCX_NET_DEVICES" in found[one].remedy
    for fine in ("mlx5_0:1,mlx5_2:1", "all", "^mlx5_3:1"):
        assert (found[fine].status, fine in found[fine].detail) == (Status.OK, True)
    for each in (root / "dev/infiniband").iterdir():
        each.unlink()
    assert next(host_checks.near_nics(root, {})).status is Status.MISSING
    assert list(host_checks.near_nics(tmp_path / "no machine", {})) == []


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_requests_or_completions_that_are_redirected_are_seen(before: int) -> None:
    for control in range(128):
        assert host_checks.redirects(config(control, before)) == bool(control & 0b1100)


def test_a_bridge_without_access_control_redirects_nothing() -> None:
    assert host_checks.redirects(config(None)) is False
    assert host_checks.redirects(bytes(4096)) is False
    assert host_checks.redirects(b"\xff" * 4096) is False
    assert host_checks.redirects(bytes(256)) is None


@given(st.lists(st.tuples(st.integers(0x100, 4092), st.binary(min_size=4, max_size=4)), max_size=12))
def test_no_configuration_space_whatever_is_walked_for_ever(patches: list[tuple[int, bytes]]) -> None:
    space = bytearray(4096)
    for at, word in patches:
        space[at : at + 4] = word
    assert host_checks.redirects(bytes(space)) in (True, False)


@pytest.mark.parametrize(("state", "status"), [(5, Status.MISSING), (0, Status.OK), (-1, Status.OK)])
def test_a_clock_that_nothing_keeps_right_is_named(monkeypatch: pytest.MonkeyPatch, state: int, status: Status) -> None:
    class Library:
        def adjtimex(self, _: object) -> int:
            return state

    monkeypatch.setattr(host_checks.ctypes, "CDLL", lambda _: Library())
    (found,) = host_checks.clock_is_kept()
    assert found.status is status
    assert bool(found.remedy) == (status is Status.MISSING)


# Configuration


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("KVMOVER_CONFIG", "KVMOVER_STORM_SEED"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_configuration_that_would_stop_an_engine_is_a_problem(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("KVMOVER_MOVER_DEADLNE_S", "5")
    (found,) = host_checks.configuration()
    assert found.status is Status.PROBLEM
    assert "did you mean KVMOVER_MOVER_DEADLINE_S?" in found.detail
    assert "kvmover config" in found.remedy


def test_a_key_file_is_read_and_its_key_not_shown(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = tmp_path / "key"
    environment.setenv("KVMOVER_SECURITY_SHARED_KEY_FILE", str(key))
    (found,) = host_checks.configuration()
    assert (found.status, "cannot read the key file" in found.detail) == (Status.PROBLEM, True)
    key.write_text("correct horse battery staple")
    (found,) = host_checks.configuration()
    any_host = "; requests may have any host dialled (exchange.allow)"
    assert found == Finding("configuration", Status.OK, f"1 setting from KVMOVER_SECURITY_SHARED_KEY_FILE{any_host}")
    environment.setenv("KVMOVER_EXCHANGE_ALLOW", "10.0.0.0/8")
    (found,) = host_checks.configuration()
    assert found.detail.startswith("2 settings from ")
    assert "dialled" not in found.detail


def test_without_a_configuration_there_are_defaults(environment: pytest.MonkeyPatch) -> None:
    (found,) = host_checks.configuration()
    unbounded = "control messages are not sealed; requests may have any host dialled (exchange.allow)"
    assert (found.status, found.detail) == (Status.OK, f"defaults; {unbounded}")


# UCX without CUDA


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(process_checks, "_gpus", lambda: ["NVIDIA H200, 143771 MiB, 9.0, 590.10"])
    monkeypatch.setattr(process_checks, "_loads", lambda _: True)
    monkeypatch.setattr(process_checks, "_version", lambda wheel: "1.5.1" if wheel == "nixl-cu13" else None)
    monkeypatch.setattr(process_checks, "ucx_module", lambda *_: True)
    monkeypatch.delenv("UCX_TLS", raising=False)
    return monkeypatch


def test_a_ucx_without_cuda_modules_is_named(with_gpu: pytest.MonkeyPatch) -> None:
    with_gpu.setattr(process_checks, "ucx_module", lambda *_: False)
    (found,) = process_checks.cuda_ipc()
    assert (found.status, found.detail) == (Status.PROBLEM, "UCX of nixl-cu13 has no CUDA module")
    assert "--with-cuda" in found.remedy


@pytest.mark.parametrize(
    ("chosen", "fine"),
    [
        ("all", True),
        ("rc,cuda", True),
        ("cuda_copy,cuda_ipc,tcp", True),
        ("^tcp", True),
        ("tcp,sm", False),
        ("", False),
    ],
)
def test_transports_of_ucx_that_leave_cuda_out_are_named(with_gpu: pytest.MonkeyPatch, chosen: str, fine: bool) -> None:
    with_gpu.setenv("UCX_TLS", chosen)
    (found,) = process_checks.cuda_ipc()
    assert (found.status is Status.OK) == fine
    assert fine or f"UCX_TLS={chosen} leaves CUDA out" in found.detail


def test_the_modules_of_a_wheels_ucx_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made(tmp_path, {"nixl_cu13.libs/nixl/libplugin_UCX.so": "", "nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0": ""})
    monkeypatch.setattr(process_checks, "plugin_folder", lambda _: tmp_path / "nixl_cu13.libs" / "nixl")
    assert process_checks.ucx_module("nixl-cu13", "uct_cuda") is True
    assert process_checks.ucx_module("nixl-cu13", "uct_gaudi") is False
    monkeypatch.setattr(process_checks, "plugin_folder", lambda _: tmp_path / "far" / "elsewhere" / "plugins")
    assert process_checks.ucx_module("nixl-cu13", "uct_cuda") is None
    monkeypatch.setattr(process_checks, "plugin_folder", lambda _: None)
    assert process_checks.ucx_module("nixl-cu13", "uct_cuda") is None


def test_the_doctor_runs_the_checks_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(host_checks.CHECKS) < set(examination.CHECKS)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--json"])
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["findings"]]
    assert {"iommu", "clock", "time", "huge pages", "configuration"} <= set(names)
    assert len(names) == len(set(names))


def test_chunks_that_fit_no_arena_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOVER_MOVER_ARENA_BYTES", "1MiB")
    (found,) = host_checks.configuration()
    assert found.status is Status.PROBLEM
    assert "chunk_bytes = 8388608 and mover.arena_bytes = 1048576" in found.detail
