"""Old import paths and names work for one release, warn of the new ones, and stand for the same things."""

from __future__ import annotations

import doctest
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from kvmover import deprecated
from kvmover.deprecated import MOVED

ROOT = Path(__file__).parent.parent
RENAMED = [(path, old, new) for path, (_, names) in MOVED.items() for old, new in names.items()]


def fresh(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What an interpreter says that has imported nothing yet."""
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


@pytest.mark.parametrize(("path", "old", "new"), RENAMED, ids=[f"{path}.{old}" for path, old, _ in RENAMED])
def test_a_name_of_old_is_the_thing_that_has_a_new_name(path: str, old: str, new: str) -> None:
    place = MOVED[path][0]
    with pytest.warns(DeprecationWarning, match=rf"{path} is {place} now|{path}.{old} is {place}.{new} now"):
        found = getattr(import_module(path), old)
    assert found is getattr(import_module(place), new)
    assert new in import_module(place).__all__
    assert not hasattr(import_module(place), old), "the new place has the new name alone"


@pytest.mark.parametrize("path", MOVED)
def test_a_name_that_stayed_is_found_at_the_old_path(path: str) -> None:
    place = MOVED[path][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the path, where no test before has imported it
        old = import_module(path)
    for name in import_module(place).__all__:
        with pytest.warns(DeprecationWarning, match=f"{place}.{name} now"):
            assert getattr(old, name) is getattr(import_module(place), name)


def test_the_warning_is_of_the_line_that_uses_the_old_path() -> None:
    done = fresh(
        "\nfrom kvmover.prefix import Key\nimport kvmover.ledger.metrics\nprint(Key.__name__)", "-W", "default"
    )
    assert done.stdout == "RadixKey\n", done.stderr
    lines = [line.split(" is ")[0] for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert lines == [
        "<string>:2: DeprecationWarning: kvmover.prefix",
        "<string>:2: DeprecationWarning: kvmover.prefix.Key",
        "<string>:3: DeprecationWarning: kvmover.ledger",
        "<string>:3: DeprecationWarning: kvmover.ledger.metrics",
    ]


def test_a_module_below_an_old_path_has_the_classes_of_the_new_one() -> None:
    code = "from kvmover.prefix.events import Medium as old\nfrom kvmover.cache.prefix.events import Medium as new"
    done = fresh(f"{code}\nprint(old is new)", "-W", "ignore")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_name_of_old_is_found_in_a_module_below_an_old_path() -> None:
    done = fresh("from kvmover.tiers.policy import Policy\nprint(Policy.__name__)", "-W", "ignore")
    assert (done.stdout, done.stderr) == ("TierPolicy\n", "")


#: A name of each module that another one has taken in.
TAKEN_IN = {
    "kvmover.cache.ledger.metrics": "LedgerCollector",
    "kvmover.cache.prefix.errors": "PrefixError",
    "kvmover.cache.prefix.joins": "join",
    "kvmover.cache.replay.agentic": "AgenticMooncakeReader",
    "kvmover.cache.replay.reader": "TraceReader",
    "kvmover.cache.replay.request": "ReplayRequest",
    "kvmover.cache.tiers.errors": "TierError",
    "kvmover.cache.tiers.hostmem": "host_pool",
    "kvmover.cache.tiers.restore": "Restore",
    "kvmover.cache.tiers.writing": "StorageEvents",
    "kvmover.config.keys": "SettingKey",
    "kvmover.kernels.config": "RowConfig",
    "kvmover.needs": "MissingLibrary",
    "kvmover.observe.start": "Observers",
    "kvmover.kernels.driver": "copy_batch",
    "kvmover.kernels.ring": "Ring",
    "kvmover.ledger.residency": "Residency",
    "kvmover.store.upkeep": "StoreRow",
    "kvmover.prefix.core": "TreeCore",
    "kvmover.prefix.publisher": "EventPublisher",
    "kvmover.tiers.copies": "LayerwiseCopier",
    "kvmover.tiers.loading": "GatedLoads",
    "kvmover.tiers.rate": "Bucket",
    "kvmover.tiers.restoring": "Restoring",
    "kvmover.tiers.rules": "Rule",
    "kvmover.transport.memory": "TensorLike",
}


@pytest.mark.parametrize(("path", "name"), TAKEN_IN.items())
def test_a_module_that_another_one_has_taken_in_is_found_at_its_old_path(path: str, name: str) -> None:
    done = fresh(f"from {path} import {name}\nprint({name}.__name__)", "-W", "ignore")
    assert (done.stdout, done.stderr) == (f"{name}\n", "")


def test_what_never_was_is_not_found_at_an_old_path() -> None:
    assert "ModuleNotFoundError" in fresh("import kvmover.prefix.nothing", "-W", "ignore").stderr
    unknown = fresh("from kvmover.prefix import Nothing", "-W", "ignore").stderr
    assert "ImportError: cannot import name 'Nothing' from 'kvmover.prefix'" in unknown


def test_new_paths_warn_of_nothing() -> None:
    places = ", ".join(place for place, _ in MOVED.values())
    assert fresh(f"import {places}", "-W", "error").stderr == ""


def test_a_module_that_stayed_has_its_old_names_by_its_getattr() -> None:
    names = {"Receipt": "LockHandle"}
    with pytest.warns(DeprecationWarning, match="kvmover.cache.prefix.Receipt is LockHandle now"):
        found = deprecated.renamed("kvmover.cache.prefix", "Receipt", names)
    assert found is import_module("kvmover.cache.prefix").LockHandle
    with pytest.raises(AttributeError, match="module 'kvmover.cache.prefix' has no attribute 'Nothing'"):
        deprecated.renamed("kvmover.cache.prefix", "Nothing", names)


def test_the_examples_of_the_module_hold() -> None:
    assert doctest.testmod(deprecated).failed == 0
