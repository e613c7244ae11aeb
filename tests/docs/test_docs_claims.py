"""What pages claim in prose holds: shares are those of the measured files, and what they tell to install there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvmover import __version__
from perf.headline import headline, of_code
from perf.readme import numbers
from perf.record import first, read

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text().split())


def packed(mib: str) -> dict[str, str]:
    return next(row for row in read("transfer") if row["mib"] == mib and row["what"].startswith("packed, 16 MiB"))


def test_the_share_of_a_contiguous_write_is_that_of_the_table() -> None:
    small, large = (float(packed(mib)["of_contiguous"]) for mib in ("64", "256"))
    times = [float(packed(mib)["of_direct"]) for mib in ("64", "256")]
    least, most = sorted((small, large))
    assert f"packed reaches {least:.2f} to {most:.2f} of one contiguous write" in page("comparison.md")
    reached = "no" if most < 0.45 else "yes"
    said = f"| {reached}: {small:.2f} at 64 MiB, {large:.2f} at 256 MiB; {times[0]:.1f} and {times[1]:.1f} times"
    assert said in page("measurements.md")


def test_the_code_that_was_measured_on_a_gpu_is_named_and_if_it_is_todays() -> None:
    row = first("bench_kernels", what="kvmover")
    assert of_code(row) in headline()
    assert numbers().count(of_code(row)) >= 2
    known = {**row, "commit": "abc1234", "code": "0123456789ab"}
    named = "commit abc1234, machine code 0123456789ab"
    assert of_code(known) == f"{named}, not compared with today's."
    assert of_code({**known, "today": "0123456789ab"}) == f"{named}, which is today's."
    assert of_code({**known, "today": "another launch"}) == f"{named}; today's is not that: another launch."


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "kvmover").rglob("*.py"))], ids=lambda path: path.name)
def test_nobody_is_told_to_install_kvmover_from_an_index(path: Path) -> None:
    assert not re.findall(r"pip install (?:--\S+ )*[\"']?kvmover(?!-\d)", path.read_text())


def test_the_page_of_the_package_names_the_wheel_that_is_built() -> None:
    (abi,) = re.findall(r'"py_limited_api": "(cp\d+)"', (ROOT / "setup.py").read_text())
    named = re.findall(r"(kvmover-\S+?\.whl)", page("package.md"))
    assert set(named) == {f"kvmover-{__version__}-{abi}-abi3-linux_x86_64.whl"}
