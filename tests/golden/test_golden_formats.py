"""Bytes that leave a process are those of the golden files: `python -m tests.golden.write` writes the files anew."""

from __future__ import annotations

import pytest

from tests.golden.files import FOLDER, read
from tests.golden.values import Golden, goldens, unnamed

_ALL = [(f"{kind}/{name}", golden) for kind, values in goldens().items() for name, golden in values.items()]


@pytest.mark.parametrize(("name", "golden"), _ALL, ids=[name for name, _ in _ALL])
def test_a_value_is_written_and_read_as_its_golden_file_has_it(name: str, golden: Golden) -> None:
    kept = read(name)
    assert golden.written == kept
    assert golden.again(kept) == kept


def test_every_class_and_kind_that_travels_or_is_stored_has_a_golden_file() -> None:
    assert not unnamed()


def test_no_golden_file_is_left_without_its_value() -> None:
    kept = {file.relative_to(FOLDER).as_posix().removesuffix(".hex") for file in FOLDER.rglob("*.hex")}
    assert kept == {name for name, _ in _ALL}
