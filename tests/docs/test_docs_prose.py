"""The count of words that name nothing, which `make lint` holds each package to, counts what it says."""

from __future__ import annotations

import ast

from tests.docs import prose


def test_words_are_counted_in_a_thousand_and_first_words_one_by_one() -> None:
    found = prose.rates(["Whoever asks: nobody knows what None is.", "None of it."], ["Of", "Returns", "Where", "Send"])
    assert found == {"what": 100.0, "nobody": 100.0, "who": 100.0, "whichever": 0.0, "openings": 2}


def test_texts_of_errors_and_of_help_are_prose_and_other_strings_are_not() -> None:
    tree = ast.parse('raise KvmoverError(f"{name} is gone"); option(help="a path"); name = "what"')
    assert [*prose.messages(tree)] == [" is gone", "a path"]


def test_a_count_above_the_most_is_named_with_its_package() -> None:
    assert prose.too_high({"cache": {"what": 4.04, "nobody": 2.06, "openings": 1}}) == [
        "cache: 2.1 of 'nobody', more than 2.0",
        "cache: 1.0 of 'openings', more than 0.0",
    ]


def test_no_package_has_more_of_these_words_than_it_may() -> None:
    assert prose.packages().keys() >= {"cache", "engines", "kernels", "pages", "transfer"}
    assert not prose.too_high({name: prose.counts(name) for name in prose.packages()})
