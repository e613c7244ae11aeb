"""The table of docs/live.md of trained models that answer in English through a prefill and a decode."""

from __future__ import annotations

from perf.record import RESULTS, read


def trained_models() -> list[str]:
    """Returns the lines of the table, a row a pair; none without results."""
    if not (RESULTS / "live_models.csv").exists():
        return []
    lines = [
        "**Trained models** (`make live MODEL=smollm2`, `gemma3`), 20 prompts made of paragraphs of docs/, beside a"
        " plain server of the decode's engine:",
        "",
        "| model | prefill | decode | requests | same | largest gap | moved |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(read("live_models"), key=lambda row: (row["model"], row["prefill"], row["decode"])):
        counts = " | ".join(row[name] for name in ("model", "prefill", "decode", "requests", "same", "logprob_gap"))
        lines.append(f"| {counts} | {int(row['moved_bytes']) / 1e6:.1f} MB |")
    return lines
