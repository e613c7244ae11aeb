"""Each Struct that is decoded by its type is prepared for threads as it is defined: else two threads crash msgspec."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Arguments of functions whose callers name the Struct.
PASSED_ON = {"cls", "kind", "made"}

RACE = """
import sys, threading
import msgspec
from kvmover.prepared import prepared
sys.setswitchinterval(1e-6)
for _ in range(2000):
    class Inner(msgspec.Struct):
        ids: list[int] | None = None
    class Outer(msgspec.Struct):
        inner: list[Inner]
        words: dict[str, int] | None = None
    prepared(Outer)
    gate = threading.Barrier(4)
    def run():
        gate.wait()
        msgspec.json.decode(b'{"inner":[{"ids":[1]}],"words":{"a":1}}', type=Outer)
    threads = [threading.Thread(target=run) for _ in range(4)]
    [each.start() for each in threads]
    [each.join() for each in threads]
"""


def decoded_by_type(tree: ast.AST) -> set[str]:
    """The names of classes that a module gives to `msgspec...decode(..., type=X)` or `msgspec.convert(value, X)`."""
    found = set[str]()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("msgspec."):
            continue
        kinds = [each.value for each in call.keywords if each.arg == "type"]
        if call.args[1:] and ast.unparse(call.func) == "msgspec.convert":
            kinds.append(call.args[1])
        found |= {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    return found - PASSED_ON


def test_every_struct_that_is_decoded_by_its_type_is_prepared() -> None:
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "kvmover").rglob("*.py")}
    asked = {name for tree in trees.values() for name in decoded_by_type(tree)}
    prepared = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "prepared" in map(ast.unparse, node.decorator_list)
    }
    assert {"Card", "RoutingHints"} <= asked
    assert asked <= prepared


@pytest.mark.proof
def test_threads_that_decode_a_prepared_struct_first_do_not_crash() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
