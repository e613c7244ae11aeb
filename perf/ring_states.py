"""Visit every order in which the two warps of the bulk kernel's ring can take their steps, which are read from bulk.cu.

`python -m perf.ring_states`, seven minutes on one core, part of `make night`. A row for each ring, by its stages and
lag: launches of few and of many items, by runs, boxes and both. Writes ring.csv, and ends with 1 if an order loses or
mixes a byte, or stops.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path

from kvmover.kernels.experimental import SOURCE
from perf.command_line import options
from perf.record import write

#: The model is beside the tests that import its parts by their own names.
MODEL = Path(__file__).parent.parent / "tests" / "kernels"


def main() -> None:
    """Search, and print a line for each ring."""
    options(__doc__).parse_args()
    sys.path.insert(0, str(MODEL))
    model = import_module("ring_model")
    text, rows = SOURCE.read_text(), list[dict[str, object]]()
    for stages, lag in model.RINGS:
        began, fault, states = time.process_time(), "", 0
        of_ring = model.launches(stages, lag)
        try:
            states = sum(model.RingBlock(text, launch).explore() for launch in of_ring)
        except model.RingFault as error:
            fault = str(error)
        cpu_s = f"{time.process_time() - began:.1f}"
        rows.append(
            {
                "stages": stages,
                "lag": lag,
                "launches": len(of_ring),
                "states": states,
                "fault": fault,
                "cpu_s": cpu_s,
            }
        )
        print(*rows[-1].values(), flush=True)
    print(f"wrote {write('ring', rows)}")
    sys.exit(any(row["fault"] for row in rows))


if __name__ == "__main__":
    main()
