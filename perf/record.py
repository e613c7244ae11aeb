"""Samples, their spread, and CSV rows that say on what they were measured: what every benchmark here shares."""

from __future__ import annotations

import csv
import fcntl
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 10th to 90th percentile of repeated samples, in seconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        deciles = quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [samples[0]] * 9
        return cls(median(samples), deciles[0], deciles[-1])


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Spread]:
    """Time every case once a round, after one round unmeasured: noise of the machine falls on all alike."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, call in cases.items():
            began = time.perf_counter()
            call()
            if number:
                samples[name].append(time.perf_counter() - began)
    return {name: Spread.of(times) for name, times in samples.items()}


def machine() -> dict[str, str]:
    """Hardware, versions and commit of this run: the last columns of every CSV."""
    packages = ("torch", "triton", "nixl-cu13", "numpy")
    return {
        "hardware": _hardware(),
        "versions": " ".join(["python " + platform.python_version(), *(f"{p} {_version(p)}" for p in packages)]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _hardware() -> str:
    cpu = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "CPU")
    text = f"{cpu}, {os.cpu_count()} cores"
    try:
        import torch
    except ModuleNotFoundError:
        return text
    return f"{torch.cuda.get_device_name()}; {text}" if torch.cuda.is_available() else text


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """Returns the commit by git, with "-dirty" for a tree that differs in more than results; or KVMOVER_COMMIT, for a
    tree that came without its history."""
    if told := os.environ.get("KVMOVER_COMMIT"):
        return told
    commit = _git("describe", "--always", "--exclude", "*") or "unknown"
    return commit + "-dirty" * bool(_git("status", "--porcelain", "-uno", "--", ".", ":!perf/results"))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def write(name: str, rows: Sequence[Mapping[str, object]], folder: Path = RESULTS) -> Path:
    """Replace `<name>.csv` by `rows`, each with the machine's columns; rows of an earlier run bring their own."""
    path = folder / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = machine()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*rows[0], *about])), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**about, **row} for row in rows)
    return path


def replace(name: str, rows: Sequence[Mapping[str, object]], keys: Sequence[str], folder: Path = RESULTS) -> Path:
    """Write `rows` in the place of those of `<name>.csv` that have the same values in the columns `keys`.

    Several processes may do so at once: each holds a lock on the folder meanwhile.
    """
    new = {tuple(str(row[key]) for key in keys) for row in rows}
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read(name, folder) if (folder / f"{name}.csv").exists() else []
        return write(name, [*rows, *(row for row in before if tuple(row[key] for key in keys) not in new)], folder)
    finally:
        os.close(lock)


def read(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def passed(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """Return the rows of runs in which every test passed: what tables of the documentation are made of."""
    return [row for row in read(name, folder) if not row.get("failed_tests")]


def first(name: str, **columns: str) -> dict[str, str]:
    """The first row of a file whose columns have these values."""
    return next(row for row in read(name) if columns.items() <= row.items())
