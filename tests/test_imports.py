"""The arrows of the house: who may import whom, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvmover"

PURE = {"enums", "errors", "needs", "numbers"}
PLANNING = PURE | {"layout", "plan"}
MOVING = PLANNING | {"kernels", "ranges", "transfer", "transport"}
KEEPING = PURE | {"ledger", "prefix"}
SERVING = MOVING | KEEPING | {"store", "tiers"}

#: What each part may import of the others.
MAY_IMPORT = {
    "enums": {"errors"},
    "errors": set(),
    "needs": {"errors"},
    "numbers": {"errors"},
    "ranges": set(),
    "kernels": set(),
    "layout": PURE,
    "prefix": PURE,
    "ledger": PURE,
    "plan": {"layout"} | PURE,
    "transport": PURE,
    "transfer": MOVING - {"transfer"},
    "store": {"layout", "transport"} | PURE,
    "tiers": SERVING - {"tiers"},
    "replay": KEEPING,
    "testing": SERVING,
    "config": {"store", "transfer"} | PURE,
    "observe": SERVING | {"config"},
    "engines": SERVING | {"config", "observe"},
    "demo": SERVING | {"config", "observe"},
    "__main__": {"cli"},
    "cli": SERVING | {"config", "observe", "engines", "demo", "replay"},
}


def modules() -> list[Path]:
    """All but the package's own front door. The link to the device code is not followed by every Python's rglob."""
    found = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")}
    return sorted(found - {PACKAGE / "__init__.py"})


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Full names of all that a module imports, wherever in it: with `from a import b` both `a` and `a.b`."""
    package = list(path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            yield from (named_by(argument) for argument in node.args)


def named_by(argument: ast.expr) -> str:
    """The literal beginning of a name given to import_module."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
    return str(first.value) if isinstance(first, ast.Constant) else ""


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has loaded after `code`."""
    proof = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", proof], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    return {name.split(".")[0] for name in done.stdout.splitlines()}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is not in the picture of the house: say who may import it, and whom it may"
    allowed = MAY_IMPORT[part] | {part}
    for name in imports(path):
        words = name.split(".")
        if words[0] == "kvmover" and len(words) > 1 and (words[1] in MAY_IMPORT or (PACKAGE / words[1]).exists()):
            assert words[1] in allowed, f"{part} must not import {name}"


def test_the_walk_sees_the_device_code_behind_the_link() -> None:
    assert {"reference", "region", "rows"} <= {path.stem for path in modules() if part_of(path) == "kernels"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_transport_over_nixl_imports_nixl(path: Path) -> None:
    found = [name for name in imports(path) if name.startswith("nixl")]
    assert not found or path.relative_to(PACKAGE).as_posix().startswith("transport/nixl"), found


def test_a_name_imported_inside_a_function_counts(tmp_path: Path) -> None:
    module = tmp_path / "kvmover" / "layout" / "bad.py"
    module.parent.mkdir(parents=True)
    module.write_text("def late():\n    from ..transfer import mover\n    import_module(f'nixl_cu{13}')\n")
    assert list(imports(module, tmp_path)) == ["kvmover.transfer", "kvmover.transfer.mover", "nixl_cu"]


def test_importing_kvmover_loads_neither_torch_nor_nixl_nor_numpy() -> None:
    loaded = modules_after("import kvmover")
    assert not {name for name in loaded if name.startswith(("torch", "triton", "nixl", "numpy"))}


def test_the_help_of_the_command_loads_neither_torch_nor_nixl_nor_numpy() -> None:
    code = (
        "import contextlib, io\nfrom kvmover.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main(['--help'])"
    )
    loaded = modules_after(code)
    assert "typer" in loaded
    assert not {name for name in loaded if name.startswith(("torch", "triton", "nixl", "numpy"))}


def test_planning_loads_neither_torch_nor_nixl() -> None:
    loaded = modules_after("import kvmover.plan.text, kvmover.observe.plan_table, kvmover.observe.picture")
    assert not {name for name in loaded if name.startswith(("torch", "triton", "nixl"))}
