"""The kernels compile for AMD's GPUs, in wide accesses and without spills. They were never run on one."""

from __future__ import annotations

from itertools import product

import pytest
from ahead import Ahead
from compilers import LIMIT_S, Compiler

from tests.proofs import family

pytestmark = pytest.mark.timeout(LIMIT_S + 30)

AHEAD = {"cases": lambda compiler: compiler.reports("amd_worker.py")}
_FEW, _ALL = (
    [Compiler(*each, cases) for each in product(("oldest", "newest"), ("gfx942", "gfx950"))] for cases in ("few", "all")
)
COMPILERS = family([*_FEW, *_ALL], few=_FEW[2:3], proved=[*_FEW, _ALL[3]])


@pytest.fixture(scope="module", params=COMPILERS, ids=str)
def cases(request: pytest.FixtureRequest, ahead: Ahead) -> dict[str, dict]:
    """By kernel and case, of one compiler."""
    found = ahead.result(request.module, "cases", request.param)
    assert len(found) == {"all": 78, "few": 8}[request.param.cases]
    return found


def test_nothing_spills_and_nothing_is_kept_in_private_memory(cases: dict[str, dict]) -> None:
    for name, code in cases.items():
        assert (code["spills"], code["private_bytes"]) == (0, 0), name


def test_aligned_rows_are_read_and_written_in_128_bits(cases: dict[str, dict]) -> None:
    """Table words are read beside them, in 32 and 64 bits, and several at once. What is left of whole units that lie
    together has more threads than such accesses.
    """
    wide = {name: code for name, code in cases.items() if "aligned" in name or name.startswith("rows budgeted")}
    assert wide
    for name, code in wide.items():
        narrower = sum(count for bits, count in code["stores"].items() if bits != "128")
        assert narrower <= ("together" in name), name
        assert code["stores"]["128"] >= 1, name
        assert code["loads"]["128"] + code["loads"]["64"] >= sum(code["stores"].values()), name


def test_narrower_words_move_whole(cases: dict[str, dict]) -> None:
    narrow = {name: code for name, code in cases.items() if name.startswith("rows word8")}
    assert narrow
    for name, code in narrow.items():
        assert code["stores"].keys() == {"64"}, name


def test_converted_numbers_are_written_as_wide_as_their_form_allows(cases: dict[str, dict]) -> None:
    """Eight numbers of bfloat16 are read in 128 bits and become 64 bits of fp8."""
    assert cases["convert 128-bf16-fp8-all"]["stores"] == {"64": 1}
    assert cases["convert 576-ds-mla-bf16-0"]["stores"] == {"128": 1}
