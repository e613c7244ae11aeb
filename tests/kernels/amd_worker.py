"""Compiles the kernels for an AMD GPU, and prints what the machine code does as JSON. Run by test_amd.py.

    amd_worker.py ARCHITECTURE all|few

The Triton is the one that comes first on PYTHONPATH. Cases are those that are compiled for NVIDIA's GPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import compile_worker
import convert_cases
import digest_worker
import triton

from kvmover.kernels import rows
from kvmover.kernels.launch import Program
from perf import machine_code

#: Each kernel, without and with a budget, once.
FEW = {
    *("rows aligned-656B-gather", "rows budgeted-256B-whole-units-of-64", "rows word8-256B-gather"),
    *("digest aligned-256B-gather", "digest word1-82B-tokens", "digest aligned-1152B-gather-budgeted"),
    *("convert 128-bf16-fp8-all", "convert 576-ds-mla-bf16-0"),
}


def launches() -> Iterator[tuple[str, Program]]:
    """Every program by name."""
    configured = (compile_worker.CONFIG, compile_worker.cases()), (compile_worker.BUDGETED, compile_worker.budgeted())
    for config, found in configured:
        for name, regions in found.items():
            yield f"rows {name}", rows.program(rows.describe(regions, config.block_bytes).shapes, config)
    for config, end in ((digest_worker.CONFIG, ""), (digest_worker.BUDGETED, "-budgeted")):
        for name, case in digest_worker.cases().items():
            yield f"digest {name}{end}", digest_worker.program(*case, config)
    for name, architecture, case, config, end in convert_cases.launches():
        if architecture == 80:  # whose numbers are converted in integers
            for part, program in convert_cases.programs(case, architecture, config, end):
                yield f"convert {name.partition('-')[2]}-{part}", program


def main() -> None:
    results = {
        name: asdict(machine_code.of_amd(program, sys.argv[1]))
        for name, program in launches()
        if sys.argv[2] == "all" or name in FEW
    }
    sys.stdout.write(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main()
