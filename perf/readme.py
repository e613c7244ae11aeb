"""The README's numbers, written from the CSV files in perf/results. `python -m perf.readme` updates the page."""

from __future__ import annotations

import re
from pathlib import Path

from perf.record import read

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- numbers -->\n).*?(<!-- /numbers -->)", re.DOTALL)


def numbers() -> str:
    """The block between the README's markers."""
    return "\n".join([*_loopback(), "", *_plan(), "", *_reference(), ""])


def _loopback() -> list[str]:
    rows = read("bench_loopback")
    about = rows[0]
    lines = [
        f"**{about['mib']} MiB between two processes**, rows of {about['row_bytes']} B, NHD to HND ({_about(about)}):",
        "",
        "| | GB/s, median (10th to 90th percentile) | of one contiguous NIXL write | times the direct route |",
        "|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{row['gb_per_s']} ({row['p10_gb_per_s']} to {row['p90_gb_per_s']})"
        lines.append(f"| {row['what']} | {spread} | {row['of_contiguous']} | {row['of_direct']} |")
    return lines


def _plan() -> list[str]:
    rows = [row for row in read("bench_plan") if row["layers"] == "80"]
    lines = [
        "**From two fleets to kernel arguments on one rank**: Llama-3-70B,"
        f" {int(rows[0]['tokens']):,} tokens, TP8 to TP2 ({_about(rows[0])}):",
        "",
        "| page | packed, microseconds | listing every row for the direct route |",
        "|---|---|---|",
    ]
    pages = sorted({int(row["page_tokens"]) for row in rows}, reverse=True)
    for page in pages:
        packed, direct = (
            next(row for row in rows if int(row["page_tokens"]) == page and row["what"].startswith(what))
            for what in ("plan and lower", "list every row")
        )
        spread = f"{packed['median_us']} ({packed['p10_us']} to {packed['p90_us']})"
        lines.append(f"| {page} | {spread} | {direct['median_us']} |")
    return lines


def _reference() -> list[str]:
    rows = [row for row in read("bench_reference") if row["what"] in ("gather", "scatter")]
    lines = [
        f"**The CPU path, as a share of a plain memcpy of the same 64 MiB** ({_about(rows[0])}):",
        "",
        "| row | gather | scatter | gather, an allocation a plane | scatter, an allocation a plane |",
        "|---|---|---|---|---|",
    ]
    for row_bytes in sorted({int(row["row_bytes"]) for row in rows}):
        cells = [
            next(
                row["of_memcpy"]
                for row in rows
                if int(row["row_bytes"]) == row_bytes and row["what"] == what and (row["allocations"] == "1") == one
            )
            for one in (True, False)
            for what in ("gather", "scatter")
        ]
        lines.append(f"| {row_bytes} B | {' | '.join(cells)} |")
    return lines


def _about(row: dict[str, str]) -> str:
    return f"{row['hardware']}; {row['versions']}"


def updated(text: str) -> str:
    return BLOCK.sub(lambda match: match[1] + numbers() + match[2], text)


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
