"""What the measurements of copies between host and device decide of the experimental engines."""

from __future__ import annotations

from collections.abc import Mapping

from kvmover.kernels.copy_engine import CopyEngine
from perf.bench_host import COUNTS, counts, verdicts

WAY, PAGE_BYTES, PAGES = "device to device", 16384, 256


def lines(rates: Mapping[str, float], pages: int = PAGES) -> list[dict[str, object]]:
    cell = {"way": WAY, "page_bytes": PAGE_BYTES, "pages": pages}
    return [{**cell, "what": what, "gb_per_s": rate} for what, rate in rates.items()]


def test_an_engine_is_kept_where_it_is_the_fastest_that_takes_few_sms() -> None:
    rates = {"one contiguous copy": 2000.0, "rows, 8 SMs": 160.0, "rows, all SMs": 2000.0, "ring, 4 SMs": 190.0}
    assert list(verdicts(lines(rates))) == [f"ring: fastest in 1 of 1, kept for {WAY}, 256 of 16384 B"]


def test_an_engine_that_is_nowhere_faster_than_the_noise_is_deleted() -> None:
    measured = lines({"rows, 8 SMs": 160.0, "ring, 8 SMs": 165.0, "copy": 100.0})
    measured += lines({"rows, 8 SMs": 160.0, "copy": 300.0, "ring, 8 SMs": 200.0, "ring, all SMs": 999.0}, pages=16)
    assert list(verdicts(measured)) == ["ring: fastest in 0 of 2, deleted"]


def test_an_engine_that_could_not_run_has_no_verdict() -> None:
    assert list(verdicts(lines({"rows, 8 SMs": 160.0, CopyEngine.COPY.value: 300.0}))) == []


def test_pools_that_hold_fewer_pages_move_what_they_hold() -> None:
    assert counts(1 << 20) == list(COUNTS)
    assert counts(1000) == [16, 256, 1000]
    assert counts(8) == [8]
