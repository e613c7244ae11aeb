"""What only a GPU can prove, in parts that fit a lease of half an hour: `python -m perf.gpu_check PART ...`.

`correctness` is first: memory checkers on the ring, all tests that need a GPU, the host's work, the digest. `transfers`
runs two processes on the one GPU over NIXL and CUDA IPC, and compares the tokens of a model; `budgets` says what a few
SMs move, and what they cost a product and a decode beside them; `english` is `transfers` with a trained model, where
its weights are there; `tuning`, last, measures tiles into a table, as many cases as its time allows. Steps stand in
order of value: each is cut to the time that is left, what is left out is said. All that a part writes is packed into
OUT/PART.tgz after each step, so that a part that is stopped loses one step, and that one file a part comes back from a
machine that returns few.

A bare machine: `--wheels FOLDER` installs from wheels, into a folder that the next part finds too, what is missing;
nothing is fetched. `python -m perf.gpu_cargo` makes such a folder for each part, which names the commit too; else
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

from perf.gpu_cargo import ALSO_NEEDED, NEEDED, brought, commit_of, joined, lading, left_out

ROOT = Path(__file__).parents[1]

#: No part takes longer: some machines end a command after 10 minutes. All together fit a lease, its start included.
LONGEST_S, ALL_S = 570.0, 28 * 60.0

#: Less than this is no step: it would be cut before it said anything.
LEAST_S = 15.0

#: Time to pack and to end, which no step gets.
RESERVE_S = 10.0

PYTHON = (sys.executable, "-W", "ignore", "-m")
PYTEST = (*PYTHON, "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-m", "gpu")
GPU_TESTS = ("tests/gpu", "tests/cache/tiers/test_tiers_on_a_gpu.py")
TWO_PROCESSES = ("tests/gpu/test_mover_on_a_gpu.py", "tests/gpu/test_mapped_on_a_gpu.py")
RING_TEST = ("-x", "tests/gpu/test_bulk_on_a_gpu.py", "-k", "any_ring")
PROFILED = (
    ("mla-scatter", "DeepSeek-V3 MLA, TP1 to TP1, NHD, page 1, scattered", ("--way", "scatter")),
    ("llama-scatter", "Llama-3-70B, TP2 to TP8, NHD, page 1, scattered", ("--way", "scatter")),
    ("llama-8-sms", "Llama-3-70B, TP2 to TP8, NHD, page 64, scattered", ("--way", "gather", "--sms", "8")),
)
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "WarpStateStats", "LaunchStats")

#: Ends with 1 where torch sees no GPU; else prints the machine, its packages and the commit.
ABOUT = (*PYTHON, "perf.gpu_time")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, the seconds that it may take, and how many of its last lines are shown. LOG is the log folder."""

    name: str
    seconds: float
    command: tuple[str, ...]
    shown: int = 12


@dataclass(frozen=True, slots=True)
class Part:
    """Steps in order of value. The part ends after `limit_s`, also where each step takes all its time."""

    limit_s: float
    steps: tuple[Step, ...]


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
    return Step(f"ncu-{name}", 25, ("ncu", *once, *sections, "--log-file", f"LOG/ncu-{name}.txt", *move), 4)


PARTS: Mapping[str, Part] = {
    "correctness": Part(
        450,
        (
            Step("memcheck", 70, sanitized("memcheck")),
            Step("tests", 220, (*PYTEST, "-n", "12", "--dist", "worksteal", "--junitxml", "LOG/tests.xml", *GPU_TESTS)),
            bench("bench_chunk", 40, "--device", "cuda"),
            bench("bench_digest", 60, "--rounds", "10"),
            Step("racecheck", 50, sanitized("racecheck")),
        ),
    ),
    "transfers": Part(
        360,
        (
            Step("two-processes", 90, (*PYTEST, *TWO_PROCESSES), 25),
            bench("gpu_tokens", 90),
            bench("bench_collectivex", 80, "--device", "cuda", "--rounds", "5"),
            bench("bench_transfer", 90, "throughput", "latency", "--device", "cuda"),
        ),
    ),
    "budgets": Part(
        440,
        (
            bench("bench_launches", 50),
            bench("roofline", 130, shown=80),
            bench("bench_kernels", 90, "--rounds", "10", shown=60),
            bench("bench_host", 80, "--rounds", "3"),
            *(profiled(*each) for each in PROFILED),
        ),
    ),
    "english": Part(140, (bench("gpu_tokens", 130, "smollm2"),)),
    "tuning": Part(290, (bench("autotune", 280),)),
}


def missing(parts: Sequence[str], wheels: Path | None, site: Path) -> list[str]:
    """Modules that a part needs, that cannot be imported, were not installed by a part before, and no wheel brings."""
    wanted = [*NEEDED, *(name for part in parts for name in ALSO_NEEDED.get(part, ()))]
    there = brought(wheels) if wheels else set[str]()
    given = {"xdist": "pytest_xdist"}
    return [
        name
        for name in wanted
        if find_spec(name) is None and not (site / name).exists() and given.get(name, name).lower() not in there
    ]


def allowed_s(step: Step, spent_s: float, limit_s: float) -> float:
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
    found = [*map(str, sorted(wheels.glob("*.whl"))), *map(str, joined(wheels, into.parent))]
    if found:
        command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(into), *found]
        subprocess.run(command, check=True)


def core_built(root: Path = ROOT) -> str:
    """Build the C core where it is missing, and return how that went: without it movers take the paths in Python."""
    if (root / "kvmover" / "_core.abi3.so").exists():
        return "_core: there"
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    began = time.monotonic()
    done = subprocess.run(build, cwd=root, capture_output=True, text=True, check=False)
    if (root / "kvmover" / "_core.abi3.so").exists():
        return f"_core: built in {time.monotonic() - began:.0f} s"
    said = [*(done.stdout + done.stderr).splitlines(), "there is no C compiler"]
    return f"_core: not built, so paths in Python are measured: {said[0][:200]}"


def run(steps: Sequence[Step], logs: Path, environ: Mapping[str, str], limit_s: float) -> Iterator[bool]:
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


def kept_folder() -> Path:
    """Returns a folder of this user alone, which later parts of a lease find again."""
    found = Path(tempfile.gettempdir()) / f"kvmover-gpu-check-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    if found.stat().st_uid != os.getuid():
        raise SystemExit(f"{found} is another user's")
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", metavar="PART", help=" or ".join(PARTS) + "; all")
    options.add_argument("--out", type=Path, default=Path("out"))
    options.add_argument("--wheels", type=Path, help="a folder of wheels for what is not installed")
    chosen = options.parse_args()
    parts = chosen.parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        options.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    site = kept_folder() / "site"
    print("\n".join(lading(ROOT, chosen.wheels)), flush=True)
    if absent := missing(parts, chosen.wheels, site):
        raise SystemExit(f"gpu_check needs {', '.join(absent)}: install them, or name a folder of their --wheels")
    if chosen.wheels:
        installed(chosen.wheels, site)
    paths = f"{site}:{ROOT}" if site.exists() else str(ROOT)
    environ = {**commit_of(chosen.wheels), **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    about = subprocess.run(ABOUT, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if about.returncode:
        raise SystemExit(about.returncode)
    print(core_built(), *left_out(site), sep="\n", flush=True)
    failed = [part for part in parts if not _part(part, chosen.out, environ, about.stdout)]
    raise SystemExit(1 if failed else 0)


def _part(name: str, out: Path, environ: Mapping[str, str], about: str) -> bool:
    """Run a part, and pack what it wrote after each step; whether all steps ended well."""
    part, logs = PARTS[name], out / name
    print(f"# {name}", flush=True)
    logs.mkdir(parents=True, exist_ok=True)
    _described(logs, about)
    ended = list[bool]()
    for well in run(part.steps, logs.absolute(), environ, part.limit_s):
        ended.append(well)
        packed(logs, out / f"{name}.tgz")
    shutil.rmtree(logs)
    return all(ended)


def _described(logs: Path, about: str) -> None:
    """Write the machine, its packages and the commit beside the logs."""
    with (logs / "machine.log").open("w") as log:
        log.write(about)
        log.flush()
        for command in (["nvidia-smi"], ["nvidia-smi", "-q", "-d", "CLOCK"]):
            if shutil.which(command[0]):
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)


if __name__ == "__main__":
    main()
