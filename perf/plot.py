"""The plots in docs/, drawn from the CSV files in perf/results."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from perf.record import read

DOCS = Path(__file__).parent.parent / "docs"

#: Grey that reads on white and on black.
INK = "#7a828c"


def loopback() -> None:
    """Bars of the two-process benchmark, log scale: the direct route is an order of magnitude away."""
    rows = [row for row in read("transfer") if row["mib"] == "64" and row["what"] != "direct, pulled"]
    figure, axes = plt.subplots(figsize=(7.6, 2.4))
    colours = ["#9aa4b0", *["#3b82f6"] * (len(rows) - 2), "#ef4444"]
    rates = [float(row["gb_per_s"]) for row in rows]
    ends = [[float(row[f"p{p}_gb_per_s"]) for row in rows] for p in (10, 90)]
    errors = [[rate - low for rate, low in zip(rates, ends[0], strict=True)]]
    errors.append([high - rate for rate, high in zip(rates, ends[1], strict=True)])
    bars = axes.barh([row["what"] for row in rows], rates, xerr=errors, color=colours, ecolor=INK, height=0.65)
    axes.bar_label(bars, [f"{row['of_contiguous']} of contiguous" for row in rows], padding=6, color=INK, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min(rates) / 2, max(ends[1]) * 6)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"GB/s, {rows[0]['mib']} MiB in rows of {rows[0]['row_bytes']} B between two processes, 2 cores", color=INK
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(colors=INK, labelsize=8)
    figure.savefig(DOCS / "loopback.svg", bbox_inches="tight", transparent=True, metadata={"Date": None})


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "kvmover"
    DOCS.mkdir(exist_ok=True)
    loopback()


if __name__ == "__main__":
    main()
