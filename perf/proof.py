"""Prove the lemmas of tests/theorems for all numbers, and check them one by one for small ones.

`make proof`, or `python -m perf.proof [THEOREM ...]`. The project's own functions run on numbers without a value, and
z3 shows that no branch leads to a false claim. Writes proof.csv, and ends with 1 if a lemma is false or open.
"""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context

from perf.command_line import options
from perf.record import write
from tests.theorems.given import LEMMAS, Verdict, counted, proved
from tests.theorems.modules import load

WORKERS = 2


def row(number: int) -> dict[str, object]:
    """Returns the row of a lemma."""
    load()
    lemma = LEMMAS[number]
    began = time.perf_counter()
    answer = proved(lemma.check)
    took = time.perf_counter() - began
    cases = counted(lemma.check, lemma.bound, lemma.drawn)
    return {
        "theorem": lemma.theorem,
        "lemma": lemma.check.__name__,
        "verdict": answer.verdict.value,
        "branches": answer.runs,
        "proof_s": f"{took:.1f}",
        "one_by_one": cases,
        "to": lemma.bound,
        "drawn": bool(lemma.drawn),
        "example": answer.example,
    }


def main() -> None:
    """Prove, and print a line for each lemma."""
    parser = options(__doc__)
    parser.add_argument("theorems", nargs="*")
    chosen = parser.parse_args().theorems
    load()
    wanted = [number for number, lemma in enumerate(LEMMAS) if not chosen or lemma.theorem in chosen]
    rows = list[dict[str, object]]()
    with get_context("spawn").Pool(WORKERS, maxtasksperchild=1) as pool:
        for found in pool.imap(row, wanted):
            rows.append(found)
            print(*(found[name] for name in ("theorem", "lemma", "verdict", "proof_s", "example")), flush=True)
    if not chosen:
        print(f"wrote {write('proof', rows)}")
    sys.exit(any(found["verdict"] != Verdict.PROVED for found in rows))


if __name__ == "__main__":
    main()
