"""A contract with an engine: what a release lacks is named with the plug-in that needs it, and the others load."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvmover.engines.common import Contract, EngineUnsupported, Need, contract, is_of
from kvmover.engines.sglang.sglang_contract import SGLANG, known_settings
from kvmover.engines.sglang.sglang_plugin import _ADAPTER_ID
from kvmover.engines.sglang.sglang_weight_updates import UPDATES, UpdateHooks
from kvmover.engines.vllm.vllm_contract import V1, VLLM

ROOT = Path(__file__).parents[2]

_MODULE = """
LIMIT = 7


class Pool:
    kind: str

    def __init__(self, pages):
        self.pages = pages

    def take(self, count, near=None): ...


class SharedPool(Pool):
    def __init__(self, pages, peers):
        super().__init__(pages)
        self.peers = peers


def place(rank, size): ...
"""

_CONTRACT = Contract(
    "Toy",
    "toy-engine",
    "kvmover.engines.toy",
    {"store": ("1.4", "1.5"), "radix": ("1.5",)},
    (
        Need("toy_engine.pools", ("store",), ("LIMIT", "Pool.kind", "Pool.pages", "Pool.take.near", "place.size")),
        Need("toy_engine.pools:Pool", ("store", "radix"), ("take",)),
        Need("toy_engine.pools:SharedPool", ("store",), ("kind", "pages", "peers", "take")),
        Need("toy_engine.pools:SOURCES", ("store",), (), lambda: ["a stand-in"]),
        Need("toy_engine.trees:Tree", ("radix",)),
        Need("toy_engine.pools:Pool", ("radix",), ("evict",)),
    ),
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Release 1.5.2.post1 of an engine, with a build tag, without trees."""
    (tmp_path / "toy_engine").mkdir()
    (tmp_path / "toy_engine" / "__init__.py").touch()
    (tmp_path / "toy_engine" / "pools.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(contract, "version", lambda _package: "1.5.2.post1+cu130")
    yield
    for name in [name for name in sys.modules if name.startswith("toy_engine")]:
        del sys.modules[name]


@pytest.mark.usefixtures("engine")
def test_a_plugin_whose_names_are_all_there_loads_and_another_is_refused_with_what_lacks() -> None:
    _CONTRACT.require("store")
    with pytest.raises(EngineUnsupported) as refused:
        _CONTRACT.require("radix")
    assert str(refused.value) == (
        "toy-engine 1.5.2.post1+cu130 lacks toy_engine.trees:Tree, toy_engine.pools:Pool.evict,"
        " which kvmover's radix for Toy uses"
    )


@pytest.mark.usefixtures("engine")
def test_a_name_that_lacks_has_its_stand_in_or_is_refused() -> None:
    assert _CONTRACT.find("toy_engine.pools:SOURCES") == ["a stand-in"]
    assert _CONTRACT.find("toy_engine.pools").LIMIT == 7
    with pytest.raises(
        EngineUnsupported, match=r"^toy-engine 1\.5\.2\S+ lacks toy_engine\.trees:Tree, which kvmover uses$"
    ):
        _CONTRACT.find("toy_engine.trees:Tree")


@pytest.mark.usefixtures("engine")
def test_a_module_that_fails_to_load_for_want_of_another_is_no_release_without_it(tmp_path: Path) -> None:
    (tmp_path / "toy_engine" / "trees.py").write_text("import a_library_that_is_not_installed")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_installed"):
        _CONTRACT.require("radix")


@pytest.mark.parametrize(
    ("found", "plugins"), [("1.5.0", 2), ("1.4.9", 1), ("1.6.0", 0), ("1.5.0rc1", 0), ("1.50.0", 0)]
)
def test_each_plugin_has_the_releases_that_it_was_tested_with_and_their_fixes(found: str, plugins: int) -> None:
    assert sum(is_of(found, releases) for releases in _CONTRACT.tested.values()) == plugins


@pytest.mark.usefixtures("engine")
def test_a_release_that_was_not_tested_is_tried_with_a_line_if_all_its_names_are_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contract, "version", lambda _package: "1.6.0")
    _CONTRACT.require("store")
    assert caplog.messages == [
        "kvmover's store for Toy was tested with toy-engine 1.4, 1.5, not with 1.6.0; it has all names that are used,"
        " and is tried"
    ]
    with pytest.raises(EngineUnsupported, match=r"1\.6\.0 lacks toy_engine\.trees:Tree, .* which kvmover's radix"):
        _CONTRACT.require("radix")


@pytest.mark.usefixtures("engine")
def test_a_strict_operator_gets_tested_releases_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOVER_ENGINE", "strict")
    _CONTRACT.require("store")
    monkeypatch.setattr(contract, "version", lambda _package: "1.6.0")
    with pytest.raises(
        EngineUnsupported, match=r"^kvmover's store for Toy was tested with toy-engine 1\.4, 1\.5, not with 1\.6\.0$"
    ):
        _CONTRACT.require("store")
    monkeypatch.setenv("KVMOVER_ENGINE", "lax")
    with pytest.raises(EngineUnsupported, match="KVMOVER_ENGINE is 'lax'; it may be 'strict', or be absent"):
        _CONTRACT.require("store")


@pytest.mark.usefixtures("engine")
def test_a_cache_in_another_place_than_the_engine_describes_is_refused_with_both() -> None:
    described = {"layer 0": (4096, 256), "layer 1": (8192, 256)}
    _CONTRACT.compare("store", described | {"layer 2": (0, 0)}, described)
    with pytest.raises(EngineUnsupported) as refused:
        _CONTRACT.compare("store", described | {"layer 1": (8192, 512)}, described)
    assert str(refused.value) == (
        "kvmover's store finds the cache of layer 1 as (8192, 512); Toy describes it as (8192, 256)"
    )
    with pytest.raises(EngineUnsupported, match="finds the cache of layer 0 as None"):
        _CONTRACT.compare("store", {}, described)


def test_an_engine_that_is_not_installed_is_said_to_be() -> None:
    with pytest.raises(EngineUnsupported, match="toy-engine is not installed; kvmover.engines.toy is loaded by Toy"):
        _CONTRACT.require("store")


_FIXED = {"V1": V1}


def _text(node: ast.expr) -> str | None:
    """A string, plain or formatted with names of the contract."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
        said = [_FIXED.get(part.id) if isinstance(part, ast.Name) else _text(part) for part in parts]
        return None if None in said else "".join(map(str, said))
    return None


@pytest.mark.parametrize(("of", "folder"), [(VLLM, "vllm"), (SGLANG, "sglang")])
def test_every_name_of_an_engine_that_an_adapter_finds_is_a_row_of_its_contract(of: Contract, folder: str) -> None:
    """Plug-ins register in processes that must not import more of the engine, and name what they hook by themselves."""
    rows, found = {need.name for need in (*of.needs, *of.hooks)}, set[str]()
    for path in sorted((ROOT / "kvmover" / "engines" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or (name := _text(node.args[0])) is None:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("find", "_wrap"):
                found.add(name)
            elif isinstance(node.func, ast.Name) and node.func.id == "import_module" and name.startswith(folder):
                assert path.name in (f"{folder}_plugin.py", f"{folder}_contract.py"), (
                    f"{path.name} imports {name} past the contract"
                )
    assert found <= rows
    assert {need.name for need in of.needs if need.stand_in} <= found


def _bases(trees: Sequence[ast.Module]) -> dict[str, str]:
    """Returns the rows, `module:name`, that the adapters' own names for parts of an engine stand for."""
    found = dict[str, str]()
    for tree in trees:
        modules = dict[str, str]()
        for node in tree.body:
            match node:
                case ast.AnnAssign(target=ast.Name(own), value=ast.Call(args=[name])):
                    if (row := _text(name)) is not None:
                        (found if ":" in row else modules)[own] = row
                case ast.AnnAssign(target=ast.Name(own), value=ast.Attribute(ast.Name(module), name)):
                    if module in modules:
                        found[own] = f"{modules[module]}:{name}"
                case _:
                    pass
    return found


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _own(of: ast.ClassDef) -> set[str]:
    """Returns the names that a class sets: methods, annotated and assigned names, and attributes of `self`."""
    found = set[str]()
    for node in ast.walk(of):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                found.add(name)
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]):
                found.add(name)
            case _:
                pass
    return found


def _inherited(of: ast.ClassDef, above: Collection[str], bases: Collection[str]) -> set[str]:
    """Returns the names that a class takes from `self`, `cls` or `super()` and that neither it nor adapters `above` it
    set, and those that it takes from one of its bases by the base's name.
    """
    own = _own(of)
    found = set[str]()
    for node in ast.walk(of):
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Load()) if name not in own and name not in above:
                found.add(name)
            case ast.Attribute(ast.Call(ast.Name("super")), name) if name not in above:
                found.add(name)
            case ast.Attribute(base, name) if _last(base) in bases:
                found.add(name)
            case _:
                pass
    return {name for name in found if not name.startswith("__")}


#: What a base sets after it was made, of a row's `init.prefill_dp_rank`.
_SET_LATER = {"prefill_dp_rank"}


@pytest.mark.parametrize(("of", "folder"), [(VLLM, "vllm"), (SGLANG, "sglang")])
def test_every_name_that_an_adapter_inherits_from_a_class_of_an_engine_is_in_the_row_of_that_class(
    of: Contract, folder: str
) -> None:
    """An older release may lack a method of the base that a later one has, and an engine ends at its first call."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "kvmover" / "engines" / folder).glob("*.py"))]
    named = {f"{need.name}.{has}".replace(":", ".") for need in of.needs for has in need.has}
    theirs = {own: row.replace(":", ".") for own, row in _bases(trees).items()}
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    unnamed = set[str]()
    for node in classes.values():
        line, bases = [node], set[str]()
        for each in line:
            bases |= {base for base in map(_last, each.bases) if base in theirs}
            line += [classes[base] for base in map(_last, each.bases) if base in classes]
        above = set[str]().union(*map(_own, line[1:]))
        for name in _inherited(node, above, bases) - _SET_LATER:
            rows = [f"{theirs[base]}.{name}" for base in sorted(bases)]
            if rows and not any(one == row or one.startswith(f"{row}.") for row in rows for one in named):
                unnamed.add(" or ".join(rows))
    assert not unnamed, "\n".join(sorted(unnamed))


def test_every_method_that_the_plug_in_of_sglang_hooks_is_a_row_of_the_contract() -> None:
    rows = {need.name.replace(":", ".") for need in SGLANG.hooks}
    hooked = set(UpdateHooks.of(UPDATES, lambda _name: True))
    tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hooked |= {_ADAPTER_ID, f"{tokenizer}._handle_batch_request", f"{tokenizer}._send_one_request"}
    assert hooked <= rows


@pytest.mark.usefixtures("engine")
def test_a_method_to_hook_is_looked_for_when_it_is_hooked() -> None:
    hooking = replace(
        _CONTRACT,
        hooks=(Need("toy_engine.pools:Pool.take", ("store",)), Need("toy_engine.pools:Pool.give", ("store",))),
    )
    hooking.require("store")
    assert hooking.find("toy_engine.pools:Pool.take").__name__ == "take"
    with pytest.raises(EngineUnsupported, match=r"lacks toy_engine\.pools:Pool\.give, which kvmover uses"):
        hooking.find("toy_engine.pools:Pool.give")


@pytest.mark.parametrize("of", [VLLM, SGLANG])
def test_a_row_is_of_a_plugin_that_the_contract_knows(of: Contract) -> None:
    rows = (*of.needs, *of.hooks)
    assert {plugin for need in rows for plugin in need.plugins} == of.tested.keys()
    assert len({need.name for need in rows}) == len(rows)


def test_settings_of_a_later_prefill_that_are_off_are_left_out_and_others_stay_to_be_refused() -> None:
    @dataclass
    class Info:
        page_size: int

    said = {"page_size": 16, "enable_kv_cache_sharding": False, "kv_layout": None, "decode_allocation_policy": "early"}
    assert known_settings(Info, said) == {"page_size": 16}
    on = {**said, "enable_kv_cache_sharding": True, "decode_allocation_policy": "late"}
    with pytest.raises(TypeError, match="enable_kv_cache_sharding"):
        Info(**known_settings(Info, on))
    assert known_settings(Info, on)["decode_allocation_policy"] == "late"
