"""A scan of an engine's newest release says which names of the contract have left, without installing it.

`python -m tests.engines.scan vllm`, or `make scan ENGINE=vllm`: the wheel comes into .engines/wheels, and its Python is
read. It ends with 1 if a plug-in lacks a name. `--release 0.31.0` is another release, `--keep` writes
perf/results/scanned_releases.csv.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvmover.engines.common import Contract
from kvmover.engines.sglang.sglang_contract import SGLANG
from kvmover.engines.vllm.vllm_contract import VLLM
from perf import record
from perf.command_line import options
from tests.engines.sources import Sources

CONTRACTS = {"sglang": SGLANG, "vllm": VLLM}

#: Wheels and their Python, which git ignores.
CACHE = Path(__file__).parents[2] / ".engines" / "wheels"


def fetch(engine: str, release: str, cache: Path) -> Path:
    """Returns the wheel of a release, "" for the newest one of the index. Raises CalledProcessError without one."""
    folder = cache / (f"{engine}-{release}" if release else f"{engine}-newest")
    what = f"{engine}=={release}" if release else engine
    pip = [sys.executable, "-m", "pip", "-qq", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*pip, what], check=True)
    return max(folder.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def unpack(wheel: Path, package: str) -> tuple[str, Sources]:
    """Returns a wheel's release and its Python, unpacked beside it."""
    release = wheel.name.split("-")[1]
    root = wheel.parent / f"python-{release}"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(root, [name for name in content.namelist() if name.endswith(".py")])
    return release, Sources(root, package)


def rows(contract: Contract, release: str, sources: Sources) -> Iterator[dict[str, str | int]]:
    """Yield a row a plug-in: how many names it uses, and which of them the release lacks."""
    for plugin in contract.tested:
        rows = [need for need in (*contract.needs, *contract.hooks) if plugin in need.plugins]
        lacking = sources.lacking(contract, plugin)
        yield {
            "engine": contract.engine,
            "release": release,
            "plugin": plugin,
            "names": sum(max(1, len(need.has)) for need in rows),
            "lacking": " ".join(lacking),
        }


def main(arguments: list[str]) -> int:
    """Scan a release, print a line a plug-in, and return the exit code."""
    parser = options(__doc__)
    parser.add_argument("engine", choices=sorted(CONTRACTS))
    parser.add_argument("--release", default="")
    parser.add_argument("--wheel", type=Path, help="a wheel that is here already")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args(arguments)
    contract = CONTRACTS[asked.engine]
    wheel = asked.wheel or fetch(asked.engine, asked.release, CACHE)
    release, sources = unpack(wheel, contract.package)
    found = list(rows(contract, release, sources))
    for row in found:
        said = f"{asked.engine} {release}, {row['plugin']}: {row['names']} names, lacks {row['lacking'] or 'none'}"
        sys.stdout.write(f"{said}\n")
    if asked.keep:
        record.replace("scanned_releases", found, ("engine", "release", "plugin"))
    return int(any(row["lacking"] for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
