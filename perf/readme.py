"""Numbers of the README and docs/live.md, from the CSV files in perf/results: `python -m perf.readme` updates both."""

from __future__ import annotations

import re
from pathlib import Path

from perf.record import RESULTS, read

ROOT = Path(__file__).parent.parent
README, LIVE = ROOT / "README.md", ROOT / "docs" / "live.md"
BLOCK = re.compile(r"(<!-- numbers -->\n).*?(<!-- /numbers -->)", re.DOTALL)


def numbers() -> str:
    """The block between the README's markers."""
    parts = (_live, _kernels, _budgets, _transfer, _plan, _reference, _prefix, _store)
    return "\n".join(line for lines in filter(None, (part() for part in parts)) for line in (*lines, ""))


#: The engines by their names in the CSV files.
_ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}


def scenarios() -> str:
    """The block between the markers of docs/live.md: a row a scenario of the last whole run that was kept."""
    if not (RESULTS / "live.csv").exists():
        return "No whole run is kept here yet.\n"
    rows = read("live")
    lines = [
        f"Last run: {rows[0]['date']}, commit {rows[0]['commit']} ({_about(rows[0])}).",
        "",
        "| engine | scenario | requests | same | wrong | failed | largest gap | p50, p99 ms | seen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = " | ".join(row[name] for name in ("requests", "same", "wrong", "failed", "logprob_gap"))
        times = f"{row['p50_ms']}, {row['p99_ms']}"
        lines.append(f"| {_ENGINES[row['engine']]} | {row['scenario']} | {counts} | {times} | {row['said']} |")
    return "\n".join([*lines, ""])


def _live() -> list[str]:
    if not all((RESULTS / f"{name}.csv").exists() for name in ("live", "live_peers")):
        return []
    rows = read("live")
    lines = [
        "**Live servers without a GPU**, tokens and log probabilities beside a plain server's;"
        f" [docs/live.md](docs/live.md) has every scenario ({_about(rows[0])}):",
        "",
        "| | scenarios | requests | same | wrong | failed |",
        "|---|---|---|---|---|---|",
    ]
    for engine in dict.fromkeys(row["engine"] for row in rows):
        mine = [row for row in rows if row["engine"] == engine]
        sums = [sum(int(row[column]) for row in mine) for column in ("requests", "same", "wrong", "failed")]
        lines.append(f"| {_ENGINES[engine]} | {len(mine)} | {' | '.join(map(str, sums))} |")
    lines += [
        "",
        "Prompts of 300 tokens one by one, then 20 at once, each way in turn in one run; milliseconds, CPU seconds of"
        " all servers of a way:",
        "",
        "| | | TTFT p50, p99 | request p50, p99 | requests/s | CPU s a request |",
        "|---|---|---|---|---|---|",
    ]
    for row in read("live_peers"):
        times = [f"{row[f'{what}_p50_ms']}, {row[f'{what}_p99_ms']}" for what in ("ttft", "request")]
        rates = f"{row['requests_per_s']} | {row['server_cpu_s_a_request']}"
        lines.append(f"| {_ENGINES[row['engine']]} | {row['way']} | {' | '.join(times)} | {rates} |")
    return lines


def _kernels() -> list[str]:
    rows = read("bench_kernels")
    lines = [
        f"**Gather and scatter on a GPU**, payload GB/s and share of a clone of the same bytes ({_about(rows[0])}):",
        "",
        "| | row | gather | scatter | SGLang's staging kernels, gather and scatter |",
        "|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {(row["way"], row["what"]): row for row in rows if row["case"] == case}
        ours, peers = (
            [found.get((way, what)) for way in ("gather", "scatter")]
            for what in ("kvmover", "SGLang staging, released")
        )
        cells = [f"{row['gb_per_s']} ({row['of_clone']})" if row else "" for row in (*ours, *peers)]
        width = next(row["row_bytes"] for row in rows if row["case"] == case)
        lines.append(f"| {case} | {width} B | {cells[0]} | {cells[1]} | {', '.join(filter(None, cells[2:]))} |")
    return lines


def _budgets() -> list[str]:
    rows = [row for row in read("roofline") if row["sms"]]
    budgets = list(dict.fromkeys(row["sms"] for row in rows))
    lines = [
        "**Under a budget of SMs**, payload GB/s, and how much longer a bf16 matrix product takes beside the gather:",
        "",
        f"| SMs | {' | '.join(budgets)} |",
        f"|---|{'---|' * len(budgets)}",
    ]
    for case in dict.fromkeys(row["what"] for row in rows):
        for way in ("gather", "scatter"):
            cells = [
                row["gb_per_s"] + (f" (x{row['matrix_slowdown']})" if row["matrix_slowdown"] else "")
                for row in rows
                if row["what"] == case and row["way"] == way
            ]
            lines.append(f"| {case}, {way} | {' | '.join(cells)} |")
    return lines


def _transfer() -> list[str]:
    rows = read("transfer")
    about = rows[0]
    lines = [
        f"**Between two processes**, rows of {about['row_bytes']} B, NHD to HND ({_about(about)}):",
        "",
        "| | MiB | GB/s, median (10th to 90th percentile) | of one contiguous NIXL write | times the direct route |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{row['gb_per_s']} ({row['p10_gb_per_s']} to {row['p90_gb_per_s']})"
        lines.append(f"| {row['what']} | {row['mib']} | {spread} | {row['of_contiguous']} | {row['of_direct']} |")
    small = read("transfer_latency")
    kib = next(row["kib"] for row in small if row["kib"] != "0")
    cells = [f"{row['what']} {row['p50_us']} ({row['p99_us']})" for row in small]
    return [*lines, "", f"16 tokens, {kib} KiB, from asking to landed, p50 (p99) in microseconds: {', '.join(cells)}."]


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


def _prefix() -> list[str]:
    rows = [row for row in read("prefix_trace") if row["page_tokens"] == "64"]
    capacities = ("3M", "10M", "unlimited")
    lines = [
        "**The prefix tree on Mooncake's conversation trace**, pages of 64 tokens: requests a second of one thread (of"
        f" SGLang's Rust core in the same run), hit rate. Ours keeps the ledger as well ({_about(rows[0])}):",
        "",
        f"| | {' | '.join(f'{capacity} tokens' if capacity != 'unlimited' else capacity for capacity in capacities)} |",
        f"|---|{'---|' * len(capacities)}",
    ]
    names = {
        "kvmover": "kvmover",
        "sglang rust core": "SGLang, Rust core",
        "sglang radix cache": "SGLang, RadixCache",
        "vllm": "vLLM, KVCacheManager, with its hashing",
    }
    for contender, name in names.items():
        found = {row["capacity"]: row for row in rows if row["contender"] == contender}
        cells = [
            f"{int(row['requests_per_s']):,} ({row['of_rust_core']}), {float(row['hit_rate']):.4f}"
            for row in (found[capacity] for capacity in capacities)
        ]
        version = next(iter(found.values()))["version"]
        lines.append(f"| {name} {version} | {' | '.join(cells)} |")
    return lines


def _store() -> list[str]:
    rows = [row for row in read("store") if row["medium"].startswith("disk")]
    columns = ("set", "get", "get scattered")
    lines = [
        "**The page store on a disk past the page cache**, GB/s, digests checked, batches of 128"
        f" (load of the machine {rows[0]['load']}; {_about(rows[0])}):",
        "",
        f"| page | | {' | '.join(columns)} | 128 look-ups, microseconds |",
        f"|---|---|{'---|' * len(columns)}---|",
    ]
    names = {
        "kvmover nixl": "kvmover",
        "sglang nixl": "SGLang, NIXL",
        "raw loop, one file": "a loop of pwritev and preadv",
    }
    for page_kib in sorted({int(row["page_kib"]) for row in rows}):
        for who, name in names.items():
            found = {row["what"]: row for row in rows if (row["who"], row["page_kib"]) == (who, str(page_kib))}
            cells = [found[what]["gb_s"] if what in found else "" for what in columns]
            looked = found["exists"]["us_for_128"] if "exists" in found else ""
            lines.append(f"| {page_kib} KiB | {name} | {' | '.join(cells)} | {looked} |")
    return lines


def _about(row: dict[str, str]) -> str:
    return f"{row['hardware']}; {row['versions']}"


def updated(text: str, block: str) -> str:
    """A page with `block` between its markers."""
    return BLOCK.sub(lambda match: match[1] + block + match[2], text)


if __name__ == "__main__":
    README.write_text(updated(README.read_text(), numbers()))
    LIVE.write_text(updated(LIVE.read_text(), scenarios()))
