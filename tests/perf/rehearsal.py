"""A program of perf/ on the make-believe H100, in sizes that take no time: `python -m tests.perf.rehearsal perf.NAME`.

Processes that a program starts import this module too, and so have the GPU and the sizes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from perf import cases
from tests.perf import make_believe_gpu

make_believe_gpu.install()

LAYERS, TOKENS = 2, 128


def small(every: tuple[cases.Case, ...]) -> tuple[cases.Case, ...]:
    """Cases of few tokens and layers."""
    return tuple(replace(case, tokens=TOKENS, component=replace(case.component, layers=LAYERS)) for case in every)


cases.CASES = small(cases.CASES)


def _few(values: Any) -> Any:
    return values[:2]


#: How constants of a program become small.
SMALL: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "perf.autotune": {"FREE": _few, "ALONE": _few},
    "perf.bench_chunk": {"TOKENS": lambda _: 256},
    "perf.bench_collectivex": {
        "CASES": lambda every: {
            name: replace(case, tokens=case.tokens // 8, component=replace(case.component, layers=LAYERS))
            for name, case in list(every.items())[::2]
        }
    },
    "perf.bench_digest": {"CASES": lambda every: small(every[-2:]), "CONFIGS": _few, "BUDGETED": _few},
    "perf.bench_host": {"COUNTS": _few, "PAGES": _few},
    "perf.bench_launches": {"CASES": small, "CHUNK_BYTES": lambda _: 64 << 10},
    "perf.bench_transfer": {
        "ROUNDS": lambda _: 1,
        "SMALL_ROUNDS": lambda _: 10,
        "CASES": lambda every: {
            name: replace(case, tokens=256) for name, case in every.items() if "more of them" not in name
        },
    },
    "perf.gpu_tokens": {"SCENARIOS": lambda _: ("replicated-dst",)},
    "perf.roofline": {
        "BUDGETS": lambda _: (8, None),
        "CEILING_BYTES": lambda _: 1 << 20,
        "CHOSEN": _few,
        "MATRIX": lambda _: 16,
    },
}

#: Options that make a run short; the last of two alike counts.
SHORT: Mapping[str, tuple[str, ...]] = {
    "perf.autotune": ("--only", "MLA, TP1 to TP1, NHD, page 64"),
    "perf.bench_chunk": ("--rounds", "2"),
    "perf.bench_collectivex": ("--rounds", "1"),
    "perf.bench_digest": ("--rounds", "1"),
    "perf.bench_host": ("--rounds", "1", "--mib", "4"),
    "perf.bench_kernels": ("--rounds", "1", "--only", "TP1"),
    "perf.bench_launches": ("--rounds", "1"),
    "perf.gpu_tokens": ("--requests", "1"),
}

#: The trained model takes minutes: an answer of drawn weights migrates in its place, unless the environment has WHOLE.
INSTEAD, WHOLE = {"smollm2": "migrate"}, "KVMOVER_WHOLE_REHEARSAL"


def main() -> None:
    _, name, *words = sys.argv
    program = import_module(name)
    for constant, shrunk in SMALL.get(name, {}).items():
        setattr(program, constant, shrunk(getattr(program, constant)))
    if WHOLE not in os.environ:
        words = [*(INSTEAD.get(word, word) for word in words), *SHORT.get(name, ())]
    sys.argv = [name, *words]
    program.main()


if __name__ == "__main__":
    main()
