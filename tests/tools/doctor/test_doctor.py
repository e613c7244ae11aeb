"""The doctor tells what works, names what is missing, and survives whatever it finds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmover import cli
from kvmover.tools.doctor import examination, process_checks
from kvmover.tools.doctor.process_checks import Finding, Status

FINE = Finding("python", Status.OK, "3.11.7")
ABSENT = Finding("nixl", Status.MISSING, "not installed", "pip install '.[nixl]'")
BROKEN = Finding("nixl-cu13 UCX", Status.PROBLEM, "does not load: misses libnope.so.1")


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", *arguments])
    return int(end.value.code or 0)


def only(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    def check() -> Iterator[Finding]:
        yield from findings

    monkeypatch.setattr(examination, "CHECKS", (check,))


def test_this_machine_is_examined_without_a_crash() -> None:
    findings = examination.examine()
    names = [each.name for each in findings]
    assert len(names) == len(set(names))
    assert {"python", "torch", "triton", "gpu", "cupy", "page lock", "shared memory"} <= set(names)
    assert not [each for each in findings if each.status is Status.MISSING and not each.detail]


def test_the_doctor_says_whether_c_or_python_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_checks, "find_spec", lambda name: object())
    assert [each.detail.split(":")[0] for each in process_checks.c_core()] == ["C"]
    monkeypatch.setenv("KVMOVER_CORE", "python")
    assert [(each.status, each.remedy) for each in process_checks.c_core()] == [(Status.MISSING, "unset KVMOVER_CORE")]
    monkeypatch.setattr(process_checks, "find_spec", lambda name: None)
    assert ["no C compiler" in each.detail for each in process_checks.c_core()] == [True]


def test_a_problem_is_exit_status_one_and_a_missing_thing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, FINE, ABSENT)
    assert status_of() == 0
    only(monkeypatch, FINE, ABSENT, BROKEN)
    assert status_of() == 1


def test_json_holds_every_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, FINE, ABSENT)
    assert status_of("--json") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == [
        {"name": "python", "status": "ok", "detail": "3.11.7", "remedy": ""},
        {"name": "nixl", "status": "missing", "detail": "not installed", "remedy": "pip install '.[nixl]'"},
    ]


def test_brackets_in_a_remedy_are_printed_and_not_taken_for_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, ABSENT)
    status_of()
    assert "-> pip install '.[nixl]'" in capsys.readouterr().out


def test_a_check_that_dies_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared_memory() -> Iterator[Finding]:
        raise OSError("libtorch_cpu.so: file too short")

    monkeypatch.setattr(examination, "CHECKS", (shared_memory, process_checks.python))
    first, second = examination.examine()
    assert first == Finding("shared_memory", Status.PROBLEM, "OSError: libtorch_cpu.so: file too short")
    assert second.name == "python"


def test_a_machine_without_torch_triton_cupy_and_nixl_is_told_what_to_install() -> None:
    code = (
        "import sys, numpy, msgspec, typer, rich\n"
        "sys.path[:] = [path for path in sys.path if 'site-packages' not in path]\n"
        "from kvmover.tools.doctor import process_checks\n"
        "for check in (process_checks.pytorch, process_checks.triton, process_checks.cupy, process_checks.nixl):\n"
        "    print(*((each.status.value, each.detail) for each in check()))\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=root
    )
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["('missing'"] * 4


@pytest.mark.parametrize(
    ("found", "status", "word"),
    [
        (None, Status.MISSING, "not installed"),
        ("3.5.1", Status.PROBLEM, "too old"),
        ("3.6.0", Status.OK, "3.6 to 3.9 are tested"),
        ("3.9.0+git1a2b3c", Status.OK, "3.6 to 3.9 are tested"),
        ("3.10.0", Status.OK, "newer than 3.9"),
    ],
)
def test_triton_is_held_to_the_releases_that_are_tested(
    monkeypatch: pytest.MonkeyPatch, found: str | None, status: Status, word: str
) -> None:
    monkeypatch.setattr(process_checks, "_version", lambda _: found)
    (finding,) = process_checks.triton()
    assert finding.status is status
    assert word in finding.detail


def test_a_plugin_that_does_not_load_names_every_library_it_misses(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    (tmp_path / "empty.c").write_text("")
    for library in ("libfirst.so", "libsecond.so"):
        subprocess.run([compiler, "-shared", "-o", tmp_path / library, tmp_path / "empty.c"], check=True)
    plugin = tmp_path / "libplugin_TWO.so"
    link = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-lfirst", "-lsecond"]
    subprocess.run([compiler, "-shared", "-o", plugin, tmp_path / "empty.c", *link], check=True)
    found = process_checks.examine(plugin)
    assert (found.name, found.loads) == ("TWO", False)
    assert found.missing[0] == "libfirst.so"
    if shutil.which("ldd"):
        assert found.missing == ("libfirst.so", "libsecond.so")


def test_a_plugin_that_is_no_library_says_so(tmp_path: Path) -> None:
    path = tmp_path / "libplugin_JUNK.so"
    path.write_bytes(b"junk" * 64)
    found = process_checks.examine(path)
    assert not found.loads
    assert "invalid ELF header" in found.error


def test_a_missing_library_is_traced_to_who_brings_it() -> None:
    assert process_checks.Plugin("GDS", False, ("libcufile.so.0",)).remedy.startswith("comes with cuFile")
    assert process_checks.Plugin("NEW", False, ("libnobodyknows.so.1",)).remedy == ""


def test_a_library_that_a_wheel_has_brought_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "cufile" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcufile.so.0").touch()
    monkeypatch.syspath_prepend(tmp_path)
    remedy = process_checks.Plugin("GDS", False, ("libcufile.so.0",)).remedy
    assert remedy == f"add {folder} to LD_LIBRARY_PATH: a wheel has brought it where no loader looks"


def test_plugins_are_looked_for_where_nixl_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    assert process_checks.plugin_folder("nixl-cu13") == tmp_path
    assert list(process_checks.plugins_of("nixl-cu13")) == []


def test_the_wheel_that_is_installed_has_a_ucx_plugin_that_loads() -> None:
    pytest.importorskip("nixl_cu13", reason="needs the nixl-cu13 wheel")
    found = {plugin.name: plugin for plugin in process_checks.plugins_of("nixl-cu13")}
    assert found["UCX"].loads
    assert all(plugin.loads or plugin.missing or plugin.error for plugin in found.values())


def test_what_has_no_driver_library_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_checks, "_gpus", lambda: ["NVIDIA H200, 143771 MiB, 9.0, 590.10"])
    monkeypatch.setattr(process_checks, "_loads", lambda library: library != "libnvidia-ml.so.1")
    (finding,) = process_checks.cuda_ipc()
    assert (finding.status, finding.detail) == (Status.PROBLEM, "misses libnvidia-ml.so.1")


def test_the_last_line_is_a_verdict() -> None:
    fine, gone = Finding("python", Status.OK, "3.11"), Finding("gpu", Status.MISSING, "none")
    broken = Finding("ucx cma", Status.PROBLEM, "ptrace_scope is 2")
    assert examination.verdict([fine]) == "everything that is here works"
    assert examination.verdict([fine, gone]) == "everything that is here works; not here: gpu"
    assert examination.verdict([fine, gone, broken]) == "1 problem: ucx cma; not here: gpu"


def test_plugins_that_nobody_needs_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wheel = Finding("nixl-cu13", Status.OK, "1.5.1")
    plugins = [Finding(f"nixl-cu13 {name}", Status.MISSING, "does not load") for name in ("GDS", "OBJ", "INFINIA")]
    examination.print_findings([wheel, Finding("nixl-cu13 UCX", Status.OK, "loads"), *plugins])
    out = capsys.readouterr().out
    assert "GDS, OBJ, INFINIA do not load, and moving KV needs none of them" in out
    assert out.count("missing") == 1
    assert out.splitlines()[-1] == "everything that is here works"
