"""The arrows of the house: who may import whom, and what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvmover"

PURE = {
    "c_core",
    "errors",
    "exposition",
    "faces",
    "fields",
    "foreign_text",
    "prepared",
    "repeats",
    "shared_memory",
    "vocabulary",
}
PLANNING = PURE | {"layout", "plan"}
MOVING = PLANNING | {"host_copies", "kernels", "regions", "transfer", "transport"}
KEEPING = PURE | {"cache.hints", "cache.ledger", "cache.prefix"}
SERVING = MOVING | KEEPING | {"bounce", "store", "cache.page_tiers", "cache.peers", "cache.tiers"}

#: What each part may import of the others.
MAY_IMPORT = {
    "c_core": {"errors"},
    "errors": set(),
    "exposition": set(),
    "faces": set(),
    "fields": {"errors"},
    "foreign_text": set(),
    "prepared": set(),
    "repeats": set(),
    "shared_memory": {"errors"},
    "vocabulary": set(),
    "kernels": {"c_core"},
    "layout": PURE,
    "cache": set(),
    "cache.prefix": PURE,
    "cache.ledger": PURE,
    "cache.hints": {"cache.prefix"} | PURE,
    "plan": {"layout"} | PURE,
    "regions": {"kernels", "layout", "plan"} | PURE,
    "host_copies": {"kernels", "plan", "regions"} | PURE,
    "transport": PURE,
    "transfer": MOVING - {"transfer"},
    "store": {"cache.prefix", "layout", "transport"} | PURE,
    "bounce": {"layout", "regions", "store"} | PURE,
    "cache.tiers": SERVING - {"cache.hints", "cache.tiers"},
    "migrate": {"cache.tiers", "transfer"} | PURE,
    "cache.peers": (MOVING | KEEPING) - {"cache.hints", "cache.peers"},
    "cache.page_tiers": (MOVING | KEEPING | {"cache.peers", "store"}) - {"cache.hints"},
    "config": {"store", "transfer"} | PURE,
    "observe": SERVING | {"config"},
    "engines": SERVING | {"config", "observe"},
    "tools": SERVING - {"cache.hints"} | {"config", "engines", "migrate", "observe"},
    "cli": {"config", "tools"} | PURE,
    "__main__": {"cli"},
}

#: What each part must import of the others, or what is said of it in README.md and DESIGN.md is not so.
MUST_REACH = {
    "transfer": {"kernels", "plan", "transport"},
    "store": {"cache.prefix", "transport"},
    "bounce": {"regions", "store"},
    "regions": {"kernels", "plan"},
    "host_copies": {"kernels", "plan", "regions"},
    "plan": {"layout"},
    "cache.hints": {"cache.prefix"},
    "cache.page_tiers": {"cache.peers", "cache.prefix", "store"},
    "cache.peers": {"cache.prefix", "transfer"},
    "cache.tiers": {"bounce", "cache.ledger", "cache.peers", "cache.prefix", "kernels", "store"},
    "observe": {"cache.ledger", "config", "plan", "transfer"},
    "engines.common": {"bounce", "cache.ledger", "cache.peers", "store", "transfer"},
    "engines.sglang": {
        "cache.ledger",
        "cache.prefix",
        "cache.tiers",
        "config",
        "observe",
        "store",
        "transfer",
        "transport",
    },
    "engines.vllm": {
        "cache.ledger",
        "cache.page_tiers",
        "cache.prefix",
        "config",
        "observe",
        "store",
        "transfer",
        "transport",
    },
    "migrate": {"cache.tiers", "transfer"},
    "tools.advise": {"plan", "tools"},
    "tools.check": {"engines", "transfer"},
    "tools.cli": {"config", "plan", "store"},
    "tools.demo": {"cache.ledger", "cache.prefix", "cache.tiers", "migrate", "plan", "store", "transfer"},
    "tools.plan_views": {"layout", "observe", "plan"},
    "tools.replay": {"cache.ledger", "cache.prefix"},
    "tools.report": {"cache.ledger", "observe", "transfer"},
    "cli": {"config", "tools"},
}

#: Parts of which nothing but the face, their `__init__`, is imported from outside: from other packages and other rooms.
FACED = {
    *(
        "cache",
        "cache.hints",
        "cache.ledger",
        "cache.page_tiers",
        "cache.peers",
        "cache.prefix",
        "cache.tiers",
        "engines.common",
        "store",
        "tools.advise",
        "tools.replay",
        "transport",
    ),
}

#: Who reaches behind which face still.
BEHIND = {("transfer", "transport")}


@cache
def modules() -> list[Path]:
    """All but the package's own front door. The link to the device code is not followed by every Python's rglob."""
    found = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")}
    return sorted(found - {PACKAGE / "__init__.py"})


def part_of(path: Path) -> str:
    return part_named(path.relative_to(PACKAGE).with_suffix("").parts)


def part_named(parts: Sequence[str]) -> str:
    """Of the parts of a name below kvmover: `cache` has rooms with arrows of their own."""
    room = ".".join(parts[:2])
    return room if room in MAY_IMPORT else parts[0]


@cache
def imports(path: Path, root: Path = ROOT) -> tuple[str, ...]:
    """Full names of all that a module imports, wherever in it: with `from a import b` both `a` and `a.b`."""
    return tuple(_imports(path, root))


def _imports(path: Path, root: Path) -> Iterator[str]:
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


def test_every_part_is_in_the_picture_of_the_house() -> None:
    assert not {part_of(path) for path in modules()} - MAY_IMPORT.keys(), "say who may import it, and whom it may"


def test_imports_follow_the_arrows() -> None:
    imported = {(part_of(path), part) for path in modules() for part in parts_imported(path)}
    assert not {(part, other) for part, other in imported if other not in MAY_IMPORT[part] | {part}}


def parts_imported(path: Path) -> set[str]:
    words = [name.split(".")[1:] for name in imports(path) if name.startswith("kvmover.")]
    return {part_named(each) for each in words if each[0] in MAY_IMPORT or (PACKAGE / each[0]).exists()}


def test_nothing_but_the_command_line_imports_the_tools() -> None:
    importing = {part_of(path) for path in modules() for name in imports(path) if name.startswith("kvmover.tools")}
    assert importing == {"cli", "tools"}


def reached(part: str) -> set[str]:
    """Parts that a part imports of, whether it is a module, a package or a room of one."""
    within = [path for path in modules() if path.is_relative_to(PACKAGE.joinpath(*part.split(".")))]
    within += [path for path in modules() if path == (PACKAGE / part).with_suffix(".py")]
    return {part_named(name.split(".")[1:]) for path in within for name in imports(path) if name.startswith("kvmover.")}


@pytest.mark.parametrize("part", MUST_REACH)
def test_what_a_part_is_said_to_do_with_others_it_does(part: str) -> None:
    assert MUST_REACH[part] <= reached(part)


def promised_arrows() -> list[tuple[str, str]]:
    """Who imports whom by DESIGN.md: of `a, b -> c -> d, e` all of one side import all of the next."""
    words = (ROOT / "DESIGN.md").read_text(encoding="utf-8").split("Imports point down:")[1].split("A test walks")[0]
    chains = [chain.split("->") for chain in re.findall(r"`([^`]*->[^`]*)`", words)]
    sides = [[[name.strip() for name in side.split(",")] for side in chain] for chain in chains]
    return [(one, other) for chain in sides for left, right in pairwise(chain) for one in left for other in right]


@pytest.mark.parametrize(("part", "other"), promised_arrows(), ids=lambda name: name)
def test_an_arrow_that_the_design_promises_is_there(part: str, other: str) -> None:
    assert other in reached(part)


def test_the_design_promises_arrows() -> None:
    assert {("transfer", "plan"), ("engines.vllm", "cache.ledger"), ("regions", "kernels")} <= set(promised_arrows())


def test_from_outside_only_the_face_of_a_package_is_imported() -> None:
    """And of the parts that are said to reach behind a face each does."""
    reaching = {(part_of(path), package) for package in FACED for path in modules() if reaches_behind(path, package)}
    assert reaching == BEHIND


def reaches_behind(path: Path, package: str) -> bool:
    """Whether a module outside a package imports a module of it, and not what its face offers."""
    if path.is_relative_to(PACKAGE.joinpath(*package.split("."))):
        return False
    inside = {name for name in imports(path) if name.startswith(f"kvmover.{package}.")}
    return any(ROOT.joinpath(*name.split(".")).with_suffix(".py").exists() for name in inside)


def test_bulk_alone_imports_the_experimental_engines() -> None:
    """A caller names one to `kernels.bulk`, and so no other part takes one by choice."""
    name = "kvmover.kernels.experimental"
    assert [path.stem for path in modules() if name in imports(path)] == ["bulk"]


def test_the_walk_sees_the_device_code_behind_the_link() -> None:
    assert {"reference", "region", "rows"} <= {path.stem for path in modules() if part_of(path) == "kernels"}


def test_only_the_transport_over_nixl_imports_nixl() -> None:
    found = [path for path in modules() if any(name.startswith("nixl") for name in imports(path))]
    assert found
    assert all(path.relative_to(PACKAGE).as_posix().startswith("transport/nixl") for path in found), found


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
    loaded = modules_after(
        "import kvmover.plan.explain, kvmover.tools.plan_views.plan_table, kvmover.tools.plan_views.plan_picture"
    )
    assert not {name for name in loaded if name.startswith(("torch", "triton", "nixl"))}
