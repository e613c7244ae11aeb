"""The tests of the toy account, which no plain run collects."""

from __future__ import annotations

import pytest

from tests.mutants import toy_account


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="3 of 2"):
        toy_account.taken(2, 3)
    assert toy_account.taken(3, 2) == 1


def test_numbers_are_counted() -> None:
    assert toy_account.counted(3) == 3


def test_the_process_lives() -> None:
    assert not toy_account.left_alone(False)
