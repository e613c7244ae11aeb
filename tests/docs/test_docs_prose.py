"""The count of words that name nothing, which `make lint` holds each package to, counts what it says."""

from __future__ import annotations

import ast
import json

import pytest

from tests.docs import prose


def test_words_are_counted_in_a_thousand_and_first_words_one_by_one() -> None:
    found = prose.rates(["Whoever asks: nobody knows what None is.", "None of it."], ["Of", "Returns", "Where", "Send"])
    assert found == {"what": 100.0, "nobody": 100.0, "who": 100.0, "whichever": 0.0, "openings": 2}


def test_texts_of_errors_and_of_help_are_prose_and_other_strings_are_not() -> None:
    tree = ast.parse('raise KvmoverError(f"{name} is gone"); option(help="a path"); name = "what"')
    assert [*prose.messages(tree)] == [" is gone", "a path"]


def test_budgets_are_of_packages_and_above_the_goals_and_no_count_is_over_one() -> None:
    budgets = json.loads(prose.BUDGETS.read_text())
    assert budgets.keys() <= prose.packages().keys()
    assert all(most > prose.GOALS[kind] for each in budgets.values() for kind, most in each.items())
    assert not [*prose.over_budget(budgets)]


def test_a_budget_falls_with_its_count_and_never_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "packages", lambda: {"cache": [], "store": []})
    today = {"cache": {**prose.GOALS, "what": 9.0}, "store": {**prose.GOALS, "what": 3.0}}
    monkeypatch.setattr(prose, "counts", lambda name: today[name])
    assert prose.lowered({"cache": {"what": 12.0}, "store": {"what": 5.0}}) == {"cache": {"what": 9.0}}
    assert prose.lowered({"cache": {"what": 6.0}}) == {"cache": {"what": 6.0}}
    assert [*prose.over_budget({"cache": {"what": 6.0}})] == ["cache: 9.0 of 'what', and its budget is 6.0"]
