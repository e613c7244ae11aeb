"""What a reader can hold: lines of a module, lines and parameters of a function, and no yes or no at a public call."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.test_imports import PACKAGE, modules

MODULE_LINES = 800
FUNCTION_LINES = 70
PARAMETERS = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef

#: Functions whose parameters an engine's own interface has: it is the engine that calls.
CALLED_BY_ENGINES = {
    ("engines/sglang/radix_tiers.py", "prefetch_from_storage"),
}

#: And those that are a bool.
OF_ENGINES = {
    ("engines/sglang/pd.py", "__init__", "is_mla_backend"),
    ("engines/sglang/radix_cache.py", "on_release", "checkpointed"),
    ("engines/sglang/radix_tiers.py", "on_release", "checkpointed"),
}


@cache
def functions(path: Path) -> tuple[Function, ...]:
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: Function) -> list[ast.arg]:
    """Without the object itself, and what a kernel is compiled for."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [one for one in every if one.arg not in ("self", "cls") and annotation(one) != "tl.constexpr"]


def annotation(parameter: ast.arg) -> str:
    return ast.unparse(parameter.annotation).strip("'\"") if parameter.annotation is not None else ""


def is_public(function: Function) -> bool:
    return not function.name.startswith("_") or function.name == "__init__"


def is_kernel(function: Function) -> bool:
    return any("jit" in ast.unparse(each) for each in function.decorator_list)


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_a_module_is_short() -> None:
    assert not [path for path in modules() if len(path.read_text(encoding="utf-8").splitlines()) > MODULE_LINES]


def test_a_function_is_short() -> None:
    found = {(place(path), each.name): lines(each) for path in modules() for each in functions(path)}
    assert not {name: count for name, count in found.items() if count > FUNCTION_LINES}


def test_a_function_has_few_parameters_but_where_an_engine_calls_it_so() -> None:
    found = {
        (place(path), each.name): len(parameters(each))
        for path in modules()
        for each in functions(path)
        if len(each.args.args) + len(each.args.kwonlyargs) > PARAMETERS and not is_kernel(each)
    }
    assert {name for name, count in found.items() if count > PARAMETERS} == CALLED_BY_ENGINES


def lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_public_function_takes_a_bool_but_where_an_engine_calls_it_so() -> None:
    found = {
        (place(path), each.name, one.arg)
        for path in modules()
        for each in functions(path)
        if is_public(each)
        for one in parameters(each)
        if annotation(one) in ("bool", "bool | None")
    }
    assert found == OF_ENGINES
