"""A row of results names the machine code that it measured, and says when a launch of today has other code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmover.kernels import rows
from kvmover.kernels.ahead_of_time import Worker, written
from kvmover.kernels.launch import RowConfig
from perf import measured_code
from perf.cases import CASES, build
from perf.measured_code import GONE, OTHER, hashed, machine_code
from perf.peers import STAGING, sglang_release
from perf.record import read, write
from tests.perf.make_believe_gpu import cubin

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".triton" / "3.6.0"
CASE, CONFIG = CASES[0], RowConfig(2048, 2)


def test_machine_code_is_found_in_the_file_of_a_kernel() -> None:
    assert machine_code(cubin(b"LDG STG EXIT")) == b"LDG STG EXIT"
    assert hashed(cubin(b"LDG")) != hashed(cubin(b"STG"))
    with pytest.raises(ValueError, match="ELF"):
        machine_code(b"PTX")


def compiled(folder: Path, comment: str, addend: int) -> bytes:
    """The cubin of a kernel of a few lines."""
    text = f"import triton\nimport triton.language as tl\n{comment}\n@triton.jit\ndef kernel(p):\n    "
    path = folder / f"a{len(comment)}_{addend}.py"
    path.write_text(f"{text}tl.store(p, tl.load(p) + {addend})\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = ASTSource(module.kernel, {"p": "*i64"}, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["cubin"]


@pytest.mark.proof
def test_code_does_not_depend_on_lines_and_comments_but_on_what_it_does(tmp_path: Path) -> None:
    plain, moved, other = (compiled(tmp_path, *each) for each in (("", 1), ("# a comment\n\n", 1), ("", 2)))
    assert plain != moved
    assert hashed(plain) == hashed(moved) != hashed(other)


def row(case: str, **changed: object) -> dict[str, object]:
    """A row of bench_kernels as it is measured, of the gather of CASE."""
    regions = build(CASE, "meta").gather
    program = rows.program(rows.describe(regions, CONFIG.block_bytes).shapes, CONFIG)
    told = {**written(program, 90), **changed}
    return {"case": case, "way": "gather", "what": "kvmover", "code": "0" * 12, "launch": json.dumps(told)}


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")  # Triton's own
def test_rows_of_code_that_has_parted_are_told_from_those_that_have_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = row(CASE.text())
    worker = Worker()
    code = measured_code.today({name: str(value) for name, value in moved.items()}, worker)
    worker.rest()
    assert len(code) == measured_code.DIGITS
    lost = row(CASE.text(), kernel=["kvmover.kernels.rows", "kernel_of_yesterday"])
    latent = "DeepSeek-V3 MLA, TP1 to TP1, NHD, page 1, scattered"
    clone = {**moved, "what": "clone", "code": "", "launch": ""}
    given = [clone, {**moved, "code": code}, moved, lost, {**moved, "case": latent}]
    write("bench_kernels", given, tmp_path)
    monkeypatch.setattr(sys, "argv", ["measured_code", "--check", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="4 rows are not true"):
        measured_code.main()
    monkeypatch.setattr(sys, "argv", ["measured_code", "--out", str(tmp_path)])
    measured_code.main()
    assert [each["today"] for each in read("bench_kernels", tmp_path)] == ["", code, code, GONE, OTHER]
    assert "bench_kernels: 3 of 4 rows measured other code" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["measured_code", "--check", "--out", str(tmp_path)])
    measured_code.main()


@pytest.mark.proof
@pytest.mark.parametrize("path", [ROOT, OLDEST], ids=["newest", "oldest"])
def test_what_the_results_say_of_their_code_is_true(path: Path) -> None:
    """Each Triton compiles what it measured."""
    environ = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "perf.measured_code", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_peer_is_named_by_its_release_and_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = tmp_path / "sglang" / STAGING
    staging.parent.mkdir(parents=True)
    staging.write_text("pass")
    monkeypatch.setenv("KVMOVER_PEERS", str(tmp_path))
    assert sglang_release().startswith("sglang of no known release, source ")
    about = tmp_path / "sglang-0.5.23.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    assert sglang_release().startswith("sglang 0.5.23, source ")
