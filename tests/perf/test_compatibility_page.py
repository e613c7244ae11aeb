"""The page of releases says what the contracts and the last matrix say."""

from __future__ import annotations

from perf import compatibility_page
from perf.record import read


def test_the_page_is_that_of_the_contracts_and_the_matrix() -> None:
    assert compatibility_page.PAGE.read_text() == compatibility_page.page(), "run: python -m perf.compatibility_page"


def test_every_pair_of_the_matrix_gave_the_tokens_of_its_decode_alone() -> None:
    rows = read("live_releases")
    assert len(rows) >= 10
    assert {(row["same"], row["wrong"], row["failed"]) for row in rows} == {("20", "0", "0")}
