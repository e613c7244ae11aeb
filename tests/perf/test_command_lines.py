"""Every program of perf/ says what it does before it does it, and a word that it does not know is refused."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Modules of perf/ that are run by name.
PROGRAMS = sorted(path.stem for path in (ROOT / "perf").glob("*.py") if '__name__ == "__main__"' in path.read_text())

#: Programs that measure a GPU, with what they must be told.
ON_A_GPU = {
    "autotune": (),
    "bench_digest": (),
    "bench_host": (),
    "bench_kernels": (),
    "bench_launches": (),
    "gpu_time": (),
    "gpu_tokens": (),
    "one_move": ("--case", "Llama-3-70B, TP2 to TP8, NHD, page 64, scattered"),
    "roofline": (),
}


def ran(program: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status of a program that is run as `python -m`, in this process."""
    monkeypatch.setattr(sys, "argv", [f"perf/{program}.py", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "perf" / f"{program}.py"), run_name="__main__")
    return end.value.code


def test_the_programs_are_found() -> None:
    assert {"bench_plan", "gpu_check", "soak", *ON_A_GPU} <= {*PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_given_without_a_run(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(program, "--help", monkeypatch=monkeypatch) == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: ")
    assert len(told.splitlines()) > 4, "the help says nothing of what is measured"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_word_too_many_is_refused_without_a_run(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(program, "--nonsense", monkeypatch=monkeypatch) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("program", ON_A_GPU)
def test_a_program_of_a_gpu_says_at_once_that_there_is_none(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert str(ran(program, *ON_A_GPU[program], monkeypatch=monkeypatch)).endswith(
        "measures a GPU, and torch sees none here"
    )


def test_the_gpu_check_starts_no_part_without_a_gpu_and_offers_its_parts(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "perf.gpu_check", "--out", str(tmp_path)]
    done = subprocess.run([*call, "foo"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "foo is none of correctness, transfers, budgets, english, tuning" in done.stderr
    environ = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(call, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "MB  in all, of 50.3" in done.stdout, "what has travelled is told first"
    assert "measures a GPU, and torch sees none here" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_profile_of_a_case_that_is_not_known_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "perf" / "nsight.sh", "nonsense"],
        env={"PATH": "/usr/bin:/bin", "OUT": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "unknown case 'nonsense'" in done.stderr
