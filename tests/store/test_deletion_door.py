"""One door: what may be another's goes by a permit, which is given on two looks of different kinds, or an order."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from kvmover.errors import StoreError
from kvmover.store.deletion import DeletionDoor, DeletionOrder, Look, Seen, TwoLooks
from tests.test_imports import PACKAGE

STORE = PACKAGE / "store"

#: Calls by which files, headers, blocks and objects of a service go, and the word that is written over a header.
DELETES = {"unlink", "rmdir", "rmtree", "removedirs", "ftruncate", "truncate", "punch", "fallocate", "cut_head"}
DELETES |= {"delete_all", "remove_all", "remove_by_regex", "remove_orphan", "RemoveObjects", "_DEAD"}
#: And those that other things have too, with what they are called of.
OF_SERVICES = {
    ("_client", "delete"),
    ("_client", "remove"),
    ("bucket", "delete"),
    ("_pool", "remove"),
    ("os", "remove"),
}

#: What a process has made itself; blocks that were given up with a permit; the socket of a keeper that is dead; a copy
#: of an index in memory, which holds no page.
OWN = {
    ("segment_catalog.py", "sweep", "punch"),
    ("segment.py", "punch", "fallocate"),
    ("segment.py", "create", "unlink"),
    ("segment.py", "append", "ftruncate"),
    ("snapshot_file.py", "_remove", "unlink"),
    ("unused.py", "_now_s", "unlink"),
    ("nixl_files.py", "_no_direct", "unlink"),
    ("nixl_files.py", "_grow", "ftruncate"),
    ("keeper/memory.py", "seal", "ftruncate"),
    ("keeper/memory.py", "give_back", "ftruncate"),
    ("keeper/server.py", "close", "unlink"),
    ("keeper/server.py", "_listen", "unlink"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def deletions() -> Iterator[tuple[str, Function, str]]:
    """File, function and name of all that deletes in kvmover/store."""
    for path in sorted(STORE.rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]
        for function in functions:
            for node in ast.walk(function):
                if name := _deletes(node):
                    yield path.relative_to(STORE).as_posix(), function, name


def _deletes(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and node.id == "_DEAD":
        return node.id
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name):
        return node.func.id if node.func.id in DELETES else ""
    if not isinstance(node.func, ast.Attribute):
        return ""
    owner = node.func.value
    owned = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return node.func.attr if node.func.attr in DELETES or (owned, node.func.attr) in OF_SERVICES else ""


def has_permit(function: Function) -> bool:
    """Whether a permit was given to a function, or it asks the door for one."""
    given = any(one.annotation and ast.unparse(one.annotation) == "Permit" for one in function.args.args)
    return given or any(isinstance(node, ast.Name) and node.id == "permit" for node in ast.walk(function))


def test_nothing_is_deleted_without_a_permit() -> None:
    found = list(deletions())
    assert len(found) > 20
    bare = {(path, function.name, name) for path, function, name in found if not has_permit(function)}
    assert bare == OWN


def test_only_the_door_makes_permits() -> None:
    for path in STORE.rglob("*.py"):
        makes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = [node.func.id for node in makes if isinstance(node.func, ast.Name)]
        assert ("Permit" in names) == (path.name == "deletion.py"), path


@pytest.mark.parametrize("seen", list(Seen))
def test_one_look_however_often_is_no_ground(seen: Seen) -> None:
    with pytest.raises(StoreError, match="one look"):
        TwoLooks(Look(seen, "missing"), Look(seen, "missing"), 1)


def test_the_door_counts_by_reason_and_keeps_to_its_budget() -> None:
    door = DeletionDoor(0)
    bad = TwoLooks(Look(Seen.READ, "digest"), Look(Seen.ANEW, "digest"), 1)
    empty = TwoLooks(Look(Seen.LISTING, "whole"), Look(Seen.ANEW, "empty segment"), 0)
    assert [door.ask(bad, 1, 0) is not None for _ in range(40)] == [True] * 32 + [False] * 8
    assert door.ask(empty, 1, 0), "what costs nobody a page costs no budget"
    assert door.ask(DeletionOrder.EVICTED, 5, 0)
    assert door.deleted == {"digest": 32, "empty segment": 1, "evicted": 5}
    door.order(DeletionOrder.EVICTED, 2)
    door.order(DeletionOrder.EXPIRED)
    assert door.ask(TwoLooks(Look(Seen.LISTING, "torn"), Look(Seen.ANEW, "torn"), 0), 0, 0)
    assert dict(door.deleted) == {"digest": 32, "empty segment": 1, "evicted": 7}
    assert sum(door.ask(bad, 1, 1800) is not None for _ in range(40)) == 16, "half of it is back in half of an hour"
    assert not any(door.ask(bad, 1, 1800) for _ in range(3600)), "to ask often brings nothing back"
    assert sum(door.ask(bad, 1, 5400) is not None for _ in range(40)) == 32
