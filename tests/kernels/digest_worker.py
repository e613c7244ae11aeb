"""Compiles the digest's kernel without a GPU, and prints what the machine code does as JSON. Run by test_digest.py.

    digest_worker.py ARCHITECTURE all|few

The Triton is the one that comes first on PYTHONPATH. Row shapes come from regions, by the same rule as a launch's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import numpy as np
import triton
from compile_worker import region

from kvmover.kernels import digest
from kvmover.kernels.digest import describe
from kvmover.kernels.digest_reference import End, Logical
from kvmover.kernels.launch import RULES, Kernel, Program, RowConfig
from kvmover.kernels.region import Region
from perf import machine_code


def cases() -> dict[str, tuple[Region, int, End | None]]:
    """Region, heads in a row, and the end that is only read, by name."""
    both = (True, True)
    return {
        "aligned-256B-gather": (region(256, 64), 1, None),
        "aligned-256B-tokens": (region(256, 1, scattered=both), 1, None),
        "aligned-1152B-gather": (region(1152, 64), 1, None),
        "aligned-656B-units": (region(656, 3, scattered=both), 1, None),
        "aligned-2048B-eight-heads": (region(2048, 16), 8, None),
        "aligned-132B-contiguous": (region(132, 64, apart=1), 1, None),
        "read-256B": (region(256, 64), 1, "src"),
        "word4-132B-gather": (region(132, 64), 1, None),
        "word1-82B-tokens": (region(82, 1, scattered=both), 1, None),
    }


#: How a launch is configured where nothing was tuned: without and with a budget of SMs.
CONFIG, BUDGETED = RULES[Kernel.DIGEST]


def program(moved: Region, heads: int, reads: End | None, config: RowConfig) -> Program:
    """The kernel of a launch of one region."""
    logical = Logical(np.arange(moved.planes), np.array([5, 1, 9, 3, 2, 7, 4]) * moved.tokens, heads_in_row=heads)
    return digest.program(describe([moved], [logical], [0], config.block_bytes).shapes, config, reads)


def main() -> None:
    results: dict[str, object] = {}
    wanted = sys.argv[2] == "all"
    launches = {name: (case, CONFIG) for name, case in list(cases().items())[:: 1 if wanted else 2]}
    budgeted = {name: (case, BUDGETED) for name, case in list(cases().items())[:: 1 if wanted else 6]}
    launches |= {f"{name}-budgeted": each for name, each in budgeted.items()}
    for name, (case, config) in launches.items():
        code = machine_code.of_program(program(*case, config), int(sys.argv[1]))
        results[name] = {
            **asdict(code),
            "opcodes": dict(code.opcodes),
            "widths": code.widths(),
            "spills": code.spills,
            "accesses": config.block_bytes // (16 * 32 * config.warps),
        }
    sys.stdout.write(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main()
