"""The algebra of plans is proved for all numbers by z3, through the project's own functions, and checked one by one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvmover.kernels import rows, table
from kvmover.layout.positions import Stripe
from kvmover.layout.span import Span
from kvmover.plan import legs
from tests.proofs import family
from tests.theorems import modules
from tests.theorems.given import LEMMAS, Lemma, Verdict, assume, counted, proved, whole
from tests.theorems.symbols import claim, gcd, power

modules.load()

#: Proved in a second or two, and in minutes.
QUICK = ("deal", "replicas", "ranks")
LONG = ("units_cover_a_run_once", "a_common_token_is_in_the_meet", "a_token_of_the_meet_is_common")
LONG += ("a_cut_page_has_one_writer", "a_clipped_stripe_holds_its_tokens_in_the_range")

FAMILY = family(
    LEMMAS,
    few=[lemma for lemma in LEMMAS if lemma.theorem in QUICK],
    proved=[lemma for lemma in LEMMAS if lemma.check.__name__ not in LONG],
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lemma", FAMILY, ids=lambda lemma: lemma.check.__name__)
def test_a_lemma_is_proved_for_numbers_without_a_bound(lemma: Lemma) -> None:
    answer = proved(lemma.check)
    assert answer.verdict is Verdict.PROVED, answer


@pytest.mark.parametrize("lemma", LEMMAS, ids=lambda lemma: lemma.check.__name__)
def test_a_lemma_holds_for_small_numbers_one_by_one(lemma: Lemma) -> None:
    """A lemma that assumes too much would hold for none; `make proof` takes all numbers up to its bound."""
    assert counted(lemma.check, lemma.bound, min(lemma.drawn, 500), most=300) > 200


#: A function of the project with a defect, by the lemma that does not survive it.
DEFECTS = {
    "some_part_holds_each": (
        Span,
        "share",
        lambda extent, parts, index: Span(index * (extent // parts), max(1, extent // parts)),
    ),
    "a_clipped_stripe_holds_its_tokens_in_the_range": (
        Stripe,
        "clip",
        lambda self, start, stop: (self,) if start <= self.start and self.stop <= stop else (),
    ),
    "a_full_page_has_one_writer": (legs, "_dealt", lambda whole, origin, unit, deal: whole),
    "rows_of_several_units_are_copied_once": (
        table.plane_and_head,
        "fn",
        lambda at, tile: (tile % (at + table.PLANES), tile // (at + table.PLANES) % (at + table.HEADS), tile),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_in_the_projects_code_is_found_with_numbers_that_show_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*DEFECTS[name])
    (lemma,) = [lemma for lemma in LEMMAS if lemma.check.__name__ == name]
    answer = proved(lemma.check)
    assert answer.verdict is Verdict.FALSE
    assert "n1 = " in answer.example


def test_the_design_names_each_theorem() -> None:
    design = (Path(__file__).parents[2] / "DESIGN.md").read_text()
    table = design.split("**Proved for all sizes.**")[1].split("Open, and checked")[0]
    assert re.findall(r"^\| ([a-z ]+) \| ", table, re.M) == list(dict.fromkeys(lemma.theorem for lemma in LEMMAS))


def test_tiles_of_whole_units_take_each_row_of_a_unit_once() -> None:
    """All shapes of units: a tile takes rows in two powers of two, and masks those that a unit does not have."""
    for unit_rows in range(1, 4097):
        first, rest = rows.first_rows.fn(unit_rows), rows.rest_rows.fn(unit_rows)
        assert first + rest >= unit_rows
        assert not rest or first < unit_rows, "the rest begins where the first rows end"
        assert all(each & (each - 1) == 0 for each in (first, rest))


def test_a_claim_that_is_false_for_large_numbers_only_is_not_proved() -> None:
    def below_a_million() -> None:
        claim(whole(0) != 1_000_003)

    assert proved(below_a_million).verdict is Verdict.FALSE
    assert counted(below_a_million, 64) == 65


def test_symbols_are_divided_as_numbers_are() -> None:
    def divided() -> None:
        number, divisor = whole(0) - whole(0), whole(1)
        quotient, rest = divmod(number, divisor)
        claim(number == quotient * divisor + rest)
        claim(rest >= 0)
        claim(rest < divisor)
        claim((number + 3 * divisor) // divisor == quotient + 3)
        claim(-(-number // divisor) * divisor >= number)

    assert proved(divided).verdict is Verdict.PROVED
    assert counted(divided, 9) > 500


def test_divisors_and_inverses_of_symbols_are_those_of_numbers() -> None:
    def coprime() -> None:
        a, b = whole(1), whole(1)
        divisor = gcd(a, b)
        p, q = a // divisor, b // divisor
        inverse = power(p, -1, q)
        claim((p * inverse - 1) % q == 0)
        claim(a % divisor == 0)
        claim(b % divisor == 0)

    assert proved(coprime).verdict is Verdict.PROVED
    assert counted(coprime, 20) == 400


def test_what_is_assumed_is_not_claimed() -> None:
    def even() -> None:
        number = whole(0)
        assume(number % 2 == 0)
        claim((number + 1) % 2 == 1)

    assert proved(even).verdict is Verdict.PROVED
    assert counted(even, 9) == 5


def test_every_branch_that_some_number_takes_is_run() -> None:
    seen = set[int]()

    def sorted_out() -> None:
        number = whole(0)
        seen.add(0 if number < 3 else 1 if number < 7 else 2)

    assert proved(sorted_out).runs == 3
    assert seen == {0, 1, 2}
