"""The table of docs/live.md in which vLLM's own connector stands beside kvmover's, for models with recurrent states."""

from __future__ import annotations

from perf.record import RESULTS, read


def hybrid_connectors() -> list[str]:
    """Returns the lines of the table: a row a model; none where no run is kept."""
    if not (RESULTS / "live_hybrids.csv").exists():
        return []
    lines = [
        "**Hybrid models through both connectors of vLLM**, the same 20 prompts, tokens and log probabilities beside a"
        " plain server's:",
        "",
        "| model | halves | connector | right | wrong | failed |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(read("live_hybrids"), key=lambda row: (row["model"], row["halves"], row["connector"])):
        counts = f"{row['same']} | {row['wrong']} | {row['failed']}"
        ends = counts if int(row["requests"]) else f"`{row['said']}` | |"
        lines.append(f"| {row['model']} | {row['halves']} | {row['connector']} | {ends} |")
    return lines
