"""An old name works for one release: it is the new thing, and the warning names that."""

from __future__ import annotations

from importlib import import_module

import pytest

RENAMED = [
    ("kvmover.store", "Box", "PageBox"),
    ("kvmover.store", "Part", "PagePart"),
    ("kvmover.config", "Key", "SettingKey"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED, ids=[old for _, old, _ in RENAMED])
def test_an_old_name_is_the_new_thing_and_says_so(module: str, old: str, new: str) -> None:
    package = import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"^{module}\.{old} is {new} now; the old name goes") as told:
        assert getattr(package, old) is getattr(package, new)
    assert told[0].filename == __file__
    assert old not in package.__all__
    assert new in package.__all__


@pytest.mark.parametrize("module", ["kvmover.store", "kvmover.config"])
def test_a_name_that_never_was_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Never'"):
        _ = import_module(module).Never
