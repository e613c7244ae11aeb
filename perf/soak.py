"""Ten minutes of requests between four processes over NIXL, some of them given up, and the memory curve of each.

Sizes, verbs, routes, chunk sizes and digests change with every request; every byte that lands is compared. Needs a
checkout: the processes are those of the tests. `python -m perf.soak [MINUTES]`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from kvmover.layout import Fleet
from perf.command_line import options
from perf.record import write
from tests.transfer.fault_crowd import Crowd
from tests.transfer.fault_rank import CONFIG, Seat
from tests.transfer.fault_storm import DECODE, PREFILL, Storm

#: Requests between two samples.
BATCH = 40
#: Nobody is to be taken for dead: UCX keeps a socket for each reconnect.
PATIENT = replace(CONFIG, deadline_s=60.0, silence_s=30.0)
SEATS = [
    *(Seat(PREFILL, Fleet(tp=2, page_tokens=16), rank, pages=256, config=PATIENT) for rank in range(2)),
    *(Seat(DECODE, Fleet(cp=2, page_tokens=24), rank, "HND", pages=256, config=PATIENT) for rank in range(2)),
]


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("minutes", nargs="?", type=float, default=10.0)
    seconds = 60 * asked.parse_args().minutes
    crowd = Crowd(SEATS)
    try:
        crowd.meet(DECODE, PREFILL)
        rows = soak(crowd, seconds)
        crowd.assert_nothing_is_left()
    finally:
        crowd.kill()
    for (engine, rank), first, last in ends(rows):
        print(f"{engine} {rank}: {first} to {last} KiB resident, from a tenth of the way to the end")
    print(f"wrote {write('soak', rows)}")


def soak(crowd: Crowd, seconds: float) -> list[dict[str, object]]:
    """A sample of every process after each batch."""
    rows: list[dict[str, object]] = []
    began, requests = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        storm = Storm(requests, crowd)
        storm.blow(BATCH, 1 << 30)  # no faults but requests that are given up
        crowd.assert_nothing_is_left()
        requests += BATCH
        for (engine, rank), process in crowd.ranks.items():
            footprint = process.ask("footprint")
            rows.append(
                {
                    "seconds": round(now),
                    "requests": requests,
                    "engine": engine,
                    "rank": rank,
                    "resident_kib": footprint["resident KiB"],
                    "file_descriptors": footprint["file descriptors"],
                    "threads": footprint["threads"],
                    "memory_maps": footprint["memory maps"],
                }
            )
    return rows


def ends(rows: list[dict[str, object]]) -> list[tuple[tuple[str, int], object, object]]:
    """(process, resident KiB when it was warm, at the end)."""
    places = list(dict.fromkeys((str(row["engine"]), int(str(row["rank"]))) for row in rows))
    curves = [[row for row in rows if (row["engine"], row["rank"]) == place] for place in places]
    return [
        (place, curve[len(curve) // 10]["resident_kib"], curve[-1]["resident_kib"])
        for place, curve in zip(places, curves, strict=True)
    ]


if __name__ == "__main__":
    main()
