"""kvmover/vocabulary.py: its equations hold, and DESIGN.md, the glossary and `kvmover` itself speak its nouns."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import kvmover
from kvmover import vocabulary
from kvmover.vocabulary import COMPANIONS, HOME, NOUNS
from tests.test_imports import modules_after

ROOT = Path(__file__).parent.parent.parent

#: The first sentence on the page about each noun, by the noun.
SENTENCES = {
    noun: " ".join(sentence.split())
    for noun, sentence in re.findall(r"^([A-Z]\w+): (.+?)\.\s", vocabulary.__doc__ or "", flags=re.M | re.S)
}


def test_the_equations_of_the_nouns_hold() -> None:
    ran = doctest.testmod(vocabulary)
    assert ran.attempted > 2 * len(SENTENCES)
    assert ran.failed == 0


def test_the_page_has_every_noun_and_nothing_else() -> None:
    assert [noun for nouns in NOUNS.values() for noun in nouns] == list(SENTENCES)


@pytest.mark.parametrize("noun", SENTENCES)
def test_a_noun_has_an_equation(noun: str) -> None:
    text = re.split(rf"^{noun}: ", vocabulary.__doc__ or "", maxsplit=1, flags=re.M)[1]
    assert ">>> " in re.split(r"^[A-Z]\w+: ", text, maxsplit=1, flags=re.M)[0]


def test_kvmover_exports_the_nouns_and_what_they_take() -> None:
    assert kvmover.__all__ == sorted([*HOME, "__version__"])
    assert not {name for names in NOUNS.values() for name in names} & {
        name for names in COMPANIONS.values() for name in names
    }


@pytest.mark.parametrize("name", HOME)
def test_a_name_is_at_home_where_the_page_says(name: str) -> None:
    value = getattr(kvmover, name)
    assert value is getattr(import_module(HOME[name]), name)
    assert value.__module__.startswith(HOME[name]), "the package defines it, and does not hand it on"


def test_design_says_of_a_noun_what_the_page_says() -> None:
    rows = re.findall(r"^\| ([A-Z]\w+) \| (.+?)(?:\. .*)? \|$", section("DESIGN.md", "## 2. The nouns"), flags=re.M)
    assert dict(row for row in rows if row[0] != "Noun") == SENTENCES


def test_the_glossary_says_of_a_noun_what_the_page_says() -> None:
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.+?) \|", (ROOT / "docs" / "concepts.md").read_text(), flags=re.M))
    for noun, sentence in SENTENCES.items():
        word = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", noun).lower()
        assert rows[word].split(". ")[0].lower() == sentence.lower(), word


def test_reading_the_page_loads_neither_torch_nor_numpy() -> None:
    loaded = modules_after("import kvmover.vocabulary")
    assert not loaded & {"torch", "numpy", "nixl", "msgspec"}


def section(name: str, heading: str) -> str:
    return (ROOT / name).read_text().split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
