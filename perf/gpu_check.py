"""What only a GPU can prove, in four parts of ten minutes: `make gpu-check`, `python -m perf.gpu_check PART ...`.

`correctness` is first: memory checkers on the ring, all tests that need a GPU, host and digest. `budgets` says what a
few SMs move, and what they cost a product and a decode beside them. `transfers` runs two processes over NIXL on the one
GPU, and the demo. `tuning` measures tiles and engines into a table, as many cases as its time allows. Steps stand in
order of value: each is cut to the time that is left, what is left out is said. All that a part writes is packed into
OUT/PART.tgz after each step, so that a part that is stopped loses one step, and that one file a part comes back from a
machine that returns few.

A bare machine: `--wheels FOLDER` installs from wheels, into a folder of its own, what is missing; nothing is fetched.
`KVMOVER_COMMIT` says which tree it is where there is no history of it. `KVMOVER_PEERS` as in perf/README.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: A part ends by then, also where each of its steps takes all its time: some machines end a command after 10 minutes.
LIMIT_S = 570.0

#: Less than this is no step: it would be cut before it said anything.
LEAST_S = 15.0

#: Time to pack and to end, which no step gets.
RESERVE_S = 10.0

#: What must be importable, and what only some parts need.
NEEDED = ("torch", "triton", "numpy", "msgspec", "pytest", "xdist", "hypothesis", "rich", "typer", "xxhash")
ALSO_NEEDED: Mapping[str, tuple[str, ...]] = {"transfers": ("nixl_cu13",)}

PYTHON = (sys.executable, "-W", "ignore", "-m")
PYTEST = (*PYTHON, "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-m", "gpu")
GPU_TESTS = ("tests/gpu", "tests/cache/tiers/test_tiers_on_a_gpu.py")
TWO_PROCESSES = "tests/gpu/test_mover_on_a_gpu.py", "tests/gpu/test_mapped_on_a_gpu.py"
RING_TEST = ("-x", "tests/gpu/test_bulk_on_a_gpu.py", "-k", "any_ring")
PROFILED = (
    ("mla-scatter", "DeepSeek-V3 MLA, TP1 to TP1, NHD, page 1, scattered", ("--way", "scatter")),
    ("llama-scatter", "Llama-3-70B, TP2 to TP8, NHD, page 1, scattered", ("--way", "scatter")),
    ("llama-8-sms", "Llama-3-70B, TP2 to TP8, NHD, page 64, scattered", ("--way", "gather", "--sms", "8")),
)
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "WarpStateStats", "LaunchStats")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, the seconds that it may take, and how many of its last lines are shown. LOG is the log folder."""

    name: str
    seconds: float
    command: tuple[str, ...]
    shown: int = 12


def sanitized(tool: str) -> tuple[str, ...]:
    """The ring of bulk copies under one of compute-sanitizer's tools."""
    return "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *PYTEST, *RING_TEST


def bench(name: str, seconds: float, *options: str, shown: int = 40) -> Step:
    """A benchmark of this folder, whose CSV goes to the log folder."""
    return Step(name, seconds, (*PYTHON, f"perf.{name}", *options, "--out", "LOG"), shown)


def profiled(name: str, case: str, options: tuple[str, ...]) -> Step:
    """Nsight Compute on one launch of a move. Clocks stay as they are: to lock them needs rights."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    once = "--clock-control", "none", "--kernel-name", "regex:move_kernel", "--launch-skip", "2", "--launch-count", "1"
    move = (*PYTHON, "perf.one_move", "--case", case, *options, "--runs", "4")
    return Step(f"ncu-{name}", 45, ("ncu", *once, *sections, "--log-file", f"LOG/ncu-{name}.txt", *move), 4)


PARTS: Mapping[str, tuple[Step, ...]] = {
    "correctness": (
        Step("memcheck", 100, sanitized("memcheck")),
        Step("tests", 220, (*PYTEST, "-n", "12", "--dist", "worksteal", "--junitxml", "LOG/tests.xml", *GPU_TESTS), 25),
        bench("bench_chunk", 40, "--device", "cuda"),
        bench("bench_host", 90, "--rounds", "5"),
        bench("bench_digest", 60, "--rounds", "10"),
        Step("racecheck", 60, sanitized("racecheck")),
    ),
    "budgets": (
        bench("roofline", 240, shown=80),
        *(profiled(*each) for each in PROFILED),
        bench("bench_kernels", 160, "--rounds", "15", shown=60),
    ),
    "transfers": (
        Step(
            "two-processes", 120, (*PYTEST, "tests/gpu/test_mover_on_a_gpu.py", "tests/gpu/test_mapped_on_a_gpu.py"), 25
        ),
        Step("demo", 90, (*PYTHON, "kvmover", "demo", "--device", "cuda"), 30),
        bench("bench_transfer", 120, "throughput", "latency", "--device", "cuda"),
        bench("bench_collectivex", 150, "--device", "cuda", "--rounds", "5"),
    ),
    "tuning": (bench("autotune", 540),),
}


def missing(parts: Sequence[str], wheels: Path | None) -> list[str]:
    """Modules that a part needs, that cannot be imported and that no wheel brings."""
    wanted = [*NEEDED, *(name for part in parts for name in ALSO_NEEDED.get(part, ()))]
    brought = {path.name.split("-")[0].lower() for path in wheels.glob("*.whl")} if wheels else set[str]()
    given = {"xdist": "pytest_xdist"}
    return [name for name in wanted if find_spec(name) is None and given.get(name, name).lower() not in brought]


def allowed_s(step: Step, spent_s: float, limit_s: float = LIMIT_S) -> float:
    """Seconds that a step gets after `spent_s` of its part; 0 where too few are left to begin it.

    >>> step = Step("tests", 220, ())
    >>> [allowed_s(step, spent_s, 570) for spent_s in (0, 400, 550)]
    [220, 160, 0]
    """
    left = limit_s - RESERVE_S - spent_s
    return min(step.seconds, left) if left >= LEAST_S else 0


def installed(wheels: Path, into: Path) -> None:
    """What the folder of wheels holds, beside what the interpreter has. Raises CalledProcessError."""
    offline = "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"
    found = sorted(map(str, wheels.glob("*.whl")))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(into), *found], check=True)


def run(steps: Sequence[Step], logs: Path, environ: Mapping[str, str], limit_s: float = LIMIT_S) -> Iterator[bool]:
    """Run the steps of a part, each with a log of its own; whether each ended well, as soon as it has."""
    began = time.monotonic()
    for step in steps:
        seconds = allowed_s(step, time.monotonic() - began, limit_s)
        command = [word.replace("LOG", str(logs), 1) if word.startswith("LOG") else word for word in step.command]
        if not seconds:
            print(f"== {step.name}: no time is left", flush=True)
            yield False
        elif shutil.which(command[0]) is None:
            print(f"== {step.name}: left out, {command[0]} is not on the PATH", flush=True)
            yield True
        else:
            yield _one(step, command, seconds, logs / f"{step.name}.log", environ)


def _one(step: Step, command: Sequence[str], seconds: float, log: Path, environ: Mapping[str, str]) -> bool:
    began = time.monotonic()
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
            said = f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            done, said = None, f"cut after {seconds:.0f} s"
    print(f"== {step.name}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(line[:200] for line in log.read_text(errors="replace").splitlines()[-step.shown :]), flush=True)
    return done is not None and done.returncode == 0


def packed(logs: Path, into: Path) -> None:
    """All logs in one file, which is whole or not there."""
    half = into.with_suffix(".half")
    with tarfile.open(half, "w:gz") as pack:
        pack.add(logs, arcname=".")
    half.replace(into)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", metavar="PART", help=" or ".join(PARTS) + "; all")
    options.add_argument("--out", type=Path, default=Path("out"))
    options.add_argument("--wheels", type=Path, help="a folder of wheels for what is not installed")
    chosen = options.parse_args()
    parts = chosen.parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        options.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    if absent := missing(parts, chosen.wheels):
        raise SystemExit(f"gpu_check needs {', '.join(absent)}: install them, or name a folder of their --wheels")
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    site = Path(tempfile.mkdtemp(prefix="kvmover-gpu-check-"))
    if chosen.wheels:
        installed(chosen.wheels, site)
        environ["PYTHONPATH"] = f"{site}:{ROOT}"
    need = (sys.executable, "-c", "from perf.gpu_time import need_gpu; need_gpu('perf.gpu_check')")
    if subprocess.run(need, cwd=ROOT, env=environ, check=False).returncode:
        shutil.rmtree(site)
        raise SystemExit(1)
    whole = True
    for part in parts:
        print(f"# {part}", flush=True)
        logs = chosen.out / part
        logs.mkdir(parents=True, exist_ok=True)
        described(logs, environ)
        for well in run(PARTS[part], logs.absolute(), environ):
            whole = whole and well
            packed(logs, chosen.out / f"{part}.tgz")
        shutil.rmtree(logs)
    shutil.rmtree(site)
    raise SystemExit(0 if whole else 1)


def described(logs: Path, environ: Mapping[str, str]) -> None:
    """The machine, its packages and the commit, beside the logs."""
    about = "from perf.record import machine; print(*machine().items(), sep=chr(10))"
    commands = (["nvidia-smi"], ["nvidia-smi", "-q", "-d", "CLOCK"], [sys.executable, "-c", about])
    with (logs / "machine.log").open("w") as log:
        for command in commands:
            if shutil.which(command[0]):
                subprocess.run(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, check=False)


if __name__ == "__main__":
    main()
