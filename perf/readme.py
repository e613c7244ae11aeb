"""Tables of README and of pages in docs/, from perf/results: `python -m perf.readme` writes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from perf.command_line import options
from perf.headline import best_clone, headline, of_code, places
from perf.hybrid_connectors import hybrid_connectors
from perf.proved_table import proved
from perf.record import RESULTS, passed, read
from perf.replaced_operators import replaced_operators
from perf.shared_table import shared
from perf.trained_models import trained_models
from perf.wrong_partner import WRONG_PARTNER, wrong_partner

ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
LIVE, MEASUREMENTS, ORCHESTRATORS = DOCS / "live.md", DOCS / "measurements.md", DOCS / "orchestrators.md"
BLOCK = re.compile(r"(<!-- numbers -->\n).*?(<!-- /numbers -->)", re.DOTALL)


def numbers() -> str:
    """The block between the markers of docs/measurements.md."""
    parts = (
        _live,
        _kernels,
        _budgets,
        _transfer,
        _wire,
        _lossless,
        _trace,
        _equal,
        _growth,
        _migrate,
        _moves,
        _request,
        _waiting,
        _open,
        _control,
        _plan,
        _reference,
        _prefix,
        _radix,
        _policies,
        _store,
        _lent,
        _kept,
    )
    return "\n".join(line for lines in filter(None, (part() for part in parts)) for line in (*lines, ""))


#: The engines by their names in the CSV files.
_ENGINES = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "sglang-vllm": "SGLang to vLLM",
    "vllm-sglang": "vLLM to SGLang",
    "transformers-transformers": "transformers to itself",
    "transformers-vllm": "transformers to vLLM",
    "vllm-transformers": "vLLM to transformers",
    "transformers-sglang": "transformers to SGLang",
    "sglang-transformers": "SGLang to transformers",
    "sglang and vllm": "SGLang and vLLM",
}


def scenarios() -> str:
    """The block between the markers of docs/live.md: a row a scenario of the last whole run that was kept, and tables
    of trained and hybrid models, of wrong partners, and of operators that fixtures replace."""
    if not (RESULTS / "live.csv").exists():
        return "No whole run is kept here yet.\n"
    rows = passed("live")
    (whole, _), *alone = Counter((row["date"], row["commit"], _about(row)) for row in rows).most_common()
    date, commit, about = whole
    lines = [
        f"Last run in which all passed: {date}, commit {commit} ({about}).",
        *(f"Scenarios run by themselves: {count}, {date}, commit {commit}." for (date, commit, _), count in alone),
        *_failed_runs(),
        "",
        "| engine | scenario | requests | same | wrong | failed | largest gap | p50, p99 ms | seen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["scenario"].startswith(WRONG_PARTNER):
            continue
        counts = " | ".join(row[name] for name in ("requests", "same", "wrong", "failed", "logprob_gap"))
        times = f"{row['p50_ms']}, {row['p99_ms']}"
        lines.append(f"| {_ENGINES[row['engine']]} | {row['scenario']} | {counts} | {times} | {row['said']} |")
    for table in (trained_models(), hybrid_connectors(), wrong_partner(_ENGINES), replaced_operators()):
        lines += ["", *table] if table else []
    return "\n".join([*lines, ""])


def orchestrated() -> str:
    """The block between the markers of docs/orchestrators.md: a row a setting, with what stopped it."""
    lines = ["| orchestrator | engine | setting | equal | moved, or what stopped it |", "|---|---|---|---|---|"]
    for row in sorted(read("live_orchestrators"), key=lambda row: (row["orchestrator"], row["engine"], row["how"])):
        seen = row["seen"] and f"`{row['seen']}`"
        moved = seen or f"{int(row['moved_bytes']) / 1e6:.1f} MB"
        engine, _, releases = row["engine"].partition(" ")
        equal = f"{row['same']} of {row['requests']}"
        lines.append(f"| {row['orchestrator']} | {_ENGINES[engine]} {releases} | {row['how']} | {equal} | {moved} |")
    return "\n".join([*lines, ""])


def _failed_runs() -> list[str]:
    """Return a line for each run in which tests failed, with their names."""
    runs = {(row["date"], row["commit"], row["failed_tests"]) for row in read("live") if row.get("failed_tests")}
    return [f"Failed since, {date}, commit {commit}: {names}." for date, commit, names in sorted(runs)]


def _live() -> list[str]:
    if not all((RESULTS / f"{name}.csv").exists() for name in ("live", "live_peers")):
        return []
    rows = passed("live")
    lines = [
        "**Live servers without a GPU**, tokens and log probabilities beside a plain server's;"
        f" [live.md](live.md) has every scenario ({_about(rows[0])}):",
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
        "The engines' own connectors beside kvmover: prompts arrive by chance, each way serves them in turn."
        " *Alone*: the servers of the other ways are paused meanwhile; *together*: they wait for requests."
        " Milliseconds, with the medians of the rounds in brackets; CPU seconds of all servers of a way:",
        "",
        "| | the machine | prompts/s | way | prompt tokens | TTFT p50 | p90 | p99 | answers/s | CPU s a request |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = {name: number for number, name in enumerate(("vllm", "sglang"))}
    rows = sorted(
        read("live_peers"), key=lambda row: (order[row["engine"]], row["machine"], float(row["arrivals_per_s"]))
    )
    for row in rows:
        about = f"{_ENGINES[row['engine']]} | {row['machine']} | {row['arrivals_per_s']} | {row['way']}"
        first = f"{row['ttft_p50_ms']} ({row['ttft_p50_of_rounds_ms']})"
        rest = [first, *(row[name] for name in ("ttft_p90_ms", "ttft_p99_ms"))]
        rates = f"{row['requests_per_s']} | {row['server_cpu_s_a_request']}"
        lines.append(f"| {about} | {row['prompt_tokens']} | {' | '.join(rest)} | {rates} |")
    return lines


def _kernels() -> list[str]:
    rows, best = read("bench_kernels"), best_clone()
    share = f"share of the fastest clone, {best} GB/s"
    lines = [
        f"**Gather and scatter on a GPU**, payload GB/s and {share} ({_about(rows[0])}):",
        _code(next(row for row in rows if row["what"] == "kvmover")),
        "",
        "| | row | gather | scatter | SGLang's staging kernels as released: gather, scatter | with aligned pointers |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {(row["way"], row["what"]): row for row in rows if row["case"] == case}
        ours, released, aligned = (
            [
                f"{row['gb_per_s']} ({float(row['gb_per_s']) / best:.3f})" if row else ""
                for row in (found.get((way, what)) for way in ("gather", "scatter"))
            ]
            for what in ("kvmover", "SGLang staging, released", "SGLang staging, aligned")
        )
        width = next(row["row_bytes"] for row in rows if row["case"] == case)
        peers = (", ".join(filter(None, each)) for each in (released, aligned))
        lines.append(f"| {case} | {width} B | {' | '.join(ours)} | {' | '.join(peers)} |")
    return lines


def _code(row: dict[str, str]) -> str:
    return f"{row['date']}, {of_code(row)}"


def _budgets() -> list[str]:
    rows = [row for row in read("roofline") if row["sms"]]
    budgets = list(dict.fromkeys(row["sms"] for row in rows))
    lines = [
        "**Under a budget of SMs**, payload GB/s, and how much longer a bf16 matrix product takes beside the gather:",
        _code(rows[0]),
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


def _equal() -> list[str]:
    rows = read("collectivex")
    who = list(dict.fromkeys(row["contender"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        "**Equal layouts**, nothing to convert, random page tables, two processes of one host: GB/s, median (10th to"
        " 90th percentile). kvmover from asking to landed, NIXL from post to done. MLA: 61 layers of 1,408 B a token,"
        " 2,048 tokens; GQA: 94 layers, K and V of 1,024 B, 1,024 tokens; pages of 64 and 16"
        f" ({_about(rows[0])}):",
        "",
        f"| | {' | '.join(cases)} |",
        f"|---|{'---|' * len(cases)}",
    ]
    for contender in who:
        found = {row["case"]: row for row in rows if row["contender"] == contender}
        cells = [f"{found[c]['gb_per_s']} ({found[c]['p10_gb_per_s']} to {found[c]['p90_gb_per_s']})" for c in cases]
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    return lines


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A sentence, and a table below it."""
    header = f"| {' | '.join(columns)} |".replace("|  |", "| |")
    return [title, "", header, "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _request() -> list[str]:
    rows = read("request")
    return _table(
        "**CPU of a request beside its bytes**, both sides together, prompts of 1 to 512 tokens, loopback, no copies;"
        f" before: commit {rows[0]['before']} in the same run ({_about(rows[0])}):",
        ("", "before, microseconds", "now (least to most of five runs)", "times"),
        (
            (row["what"], row["before_us"], f"{row['now_us']} ({row['low_us']} to {row['high_us']})", row["ratio"])
            for row in rows
        ),
    )


def _waiting() -> list[str]:
    rows = read("waiting")
    return _table(
        f"**{int(rows[0]['open']):,} requests that wait for their prefill**, CPU time, polled 100 times a second;"
        f" before: commit d77baa8 in the same run ({_about(rows[0])}):",
        ("", "before", "now"),
        ((row["case"], row["before"], row["now"]) for row in rows),
    )


def _wire() -> list[str]:
    if not (RESULTS / "wire.csv").exists():
        return []
    rows = read("wire")
    return _table(
        "**A wire that costs**: 32 MiB of bfloat16 between network namespaces, NIXL over TCP, from asking to landed;"
        f" `make wire` ({_about(rows[0])}):",
        ("cable", "way", "ms, median", "10th to 90th percentile", "of raw NIXL's rate", "predicted, ms"),
        ([row[name] for name in ("cable", "way", "ms", "spread_ms", "of_raw", "predicted_ms")] for row in rows),
    )


def _lossless() -> list[str]:
    if not (RESULTS / "lossless.csv").exists():
        return []
    rows = [row for row in read("lossless") if row["wire_ms"]]
    return _table(
        "**A lossless code that the wire does not have**: bfloat16 KV of SmolLM2, 3 bits for an exponent, and a list of"
        " escapes of planned length, for one number in 32, 16 or 8; pages that do not fit their list go as they are."
        f" {rows[0]['by'].capitalize()}; 32 MiB at 1 Gb/s by the cost model ({_about(rows[0])}):",
        ("of", "block", "escapes", "ratio, 1 in 32", "1 in 16", "1 in 8", "coded, decoded, GB/s", "ms at 1 Gb/s"),
        (
            (
                *(row[name] for name in ("of", "blocks", "escapes", "ratio_32", "ratio_16", "ratio_8")),
                f"{row['encode_gb_s']}, {row['decode_gb_s']}",
                f"{row['wire_coded_ms']}, as it is {row['wire_ms']}",
            )
            for row in rows
        ),
    )


def _trace() -> list[str]:
    if not (RESULTS / "simulated_trace.csv").exists():
        return []
    rows = read("simulated_trace")
    live = [row for row in rows if row["predicted_ms"]]
    words = [f"{row['what']} {row['predicted_ms']} of {float(row['measured_ms']):.1f} ms" for row in live]
    movers, counted = (row for row in rows if row["what"].startswith("small fleet"))
    return [
        *_table(
            "**Requests to 1,024 ranks on virtual time**, some of which die; at the last rate they are too many"
            f" ({rows[0]['commit']}):",
            (
                "requests",
                "a second",
                "deaths",
                "asked again",
                "messages a rank and second",
                "p50, p99 ms",
                "full first at",
            ),
            (
                (
                    f"{int(row['requests']):,}",
                    f"{int(row['requests_a_s']):,}",
                    row["deaths"],
                    row["asked_again"],
                    f"{int(row['messages_a_rank_s']):,}",
                    f"{row['p50_ms']}, {row['p99_ms']}",
                    f"{(full := row['breaks_first'])} at {int(row[full.lower() + '_full_at_requests_a_s']):,} a second",
                )
                for row in rows
                if row["what"] == "trace"
            ),
        ),
        "",
        f"Bytes and messages (but Granted) of a small fleet are those of whole movers, rank by rank; its p99 is"
        f" {counted['p99_ms']} ms where movers have {movers['p99_ms']}. One request on a wire, simulated and measured:"
        f" {'; '.join(words)}.",
    ]


def _open() -> list[str]:
    if not (RESULTS / "open.csv").exists():
        return []
    rows = read("open")
    return _table(
        f"**What is open costs nothing**: CPU time, us, with few and with many of what might make a call dearer"
        f" ({_about(rows[0])}):",
        ("call", "beside", "few", "us", "many", "us"),
        (
            (row["call"], row["grows"], f"{int(row['few']):,}", row["few_us"], f"{int(row['many']):,}", row["many_us"])
            for row in rows
        ),
    )


def _control() -> list[str]:
    if not (RESULTS / "control.csv").exists():
        return []
    rows = read("control")
    return _table(
        f"**CPU of a request beside raw NIXL**, both sides' calling threads, waiting for NIXL's threads included"
        f" ({_about(rows[0])}):",
        ("", "descriptors", "us, median (least)", "of raw NIXL's", "notes"),
        (
            (
                row["way"],
                row["descriptors"],
                f"{row['cpu_us']} ({row['least_us']})",
                f"{row['of_raw']} ({row['p10_of_raw']} to {row['p90_of_raw']})",
                row["notes"],
            )
            for row in rows
        ),
    )


def _growth() -> list[str]:
    rows = read("growth")
    about = rows[0]
    return _table(
        f"**A prompt computed in {about['chunks']} chunks** of {about['compute_ms_a_chunk']} ms,"
        f" {int(about['tokens']):,} tokens, 256 MiB, two processes over NIXL: from its last chunk computed to landed"
        f" ({_about(about)}):",
        ("", "ms, median (10th to 90th percentile)"),
        ((row["way"], f"{row['after_last_chunk_ms']} ({row['low_ms']} to {row['high_ms']})") for row in rows),
    )


def _migrate() -> list[str]:
    rows = read("migrate")
    about = rows[0]
    return _table(
        f"**A running request that moves**, {int(about['tokens']):,} tokens of {int(about['token_bytes']) // 1024} KiB"
        f" and one more every {about['step_ms']} ms, two processes over NIXL: from its last token at the source to its"
        f" next at the target ({_about(about)}):",
        ("", "moves", "pause in ms, p50 and p99", "in token steps", "tokens computed meanwhile, median"),
        (
            (
                row["way"],
                row["moves"],
                f"{row['pause_p50_ms']}, {row['pause_p99_ms']}",
                f"{row['pause_p50_steps']}, {row['pause_p99_steps']}",
                row["computed_meanwhile"],
            )
            for row in rows
        ),
    )


def _moves() -> list[str]:
    rows = read("live_moves")
    return _table(
        "**A running request that a router moves** between live vLLM servers without a GPU, TP2 in blocks of 16 and TP1"
        f" in blocks of 64, both ways: from its last token at one to its first at the other ({_about(rows[0])}):",
        ("", "moves", "pause in ms, p50 and p99", "a token, ms", "tokens moved, and of them before it stopped, median"),
        (
            (
                row["way"],
                row["moves"],
                f"{row['pause_p50_ms']}, {row['pause_p99_ms']}",
                row["token_ms"],
                f"{row['moved_tokens']}, {row['copied_before_tokens']}",
            )
            for row in rows
        ),
    )


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
        "kvmover int64": "kvmover, of tokens in 64 bits",
        "kvmover list": "kvmover, of tokens in a list",
        "kvmover events": "kvmover, with KV events",
        "kvmover in sglang": "kvmover at SGLang's own interface",
        "kvmover in sglang gathering": "kvmover at SGLang's own interface, indices gathered",
        "kvmover in sglang events": "kvmover at SGLang's own interface, with KV events",
        "kvmover in sglang windows": "kvmover at SGLang's own interface, with windows and allocations",
        "kvmover in python": "kvmover without its C core",
        "sglang rust core": "SGLang, Rust core",
        "sglang rust core list": "SGLang, Rust core, of tokens in a list",
        "sglang rust gathering": "SGLang, Rust core, indices gathered",
        "sglang rust core events": "SGLang, Rust core, with KV events",
        "sglang rust core windows": "SGLang, Rust core, with windows and allocations",
        "sglang radix cache": "SGLang, RadixCache",
        "vllm": "vLLM, KVCacheManager, with its hashing",
    }
    for contender, name in names.items():
        found = {row["capacity"]: row for row in rows if row["contender"] == contender}
        if not found:
            continue
        cells = [
            f"{int(row['requests_per_s']):,} ({row['of_rust_core']}), {float(row['hit_rate']):.4f}" if row else ""
            for row in map(found.get, capacities)
        ]
        version = next(iter(found.values()))["version"]
        lines.append(f"| {name} {version} | {' | '.join(cells)} |")
    return lines


def _radix() -> list[str]:
    rows = read("radix")
    purposes = ("match", "lock", "gather", "evict", "keep", "account", "sizes")
    lines = [
        f"**The radix cache in SGLang's scheduling**, the first {rows[0]['requests']} requests of the same trace, 3M"
        " tokens, chunks of 8,192: microseconds of thread CPU time that SGLang's own admission, allocation, checkpoints"
        f" and release spend inside the cache. Ours keeps the ledger as well ({_about(rows[0])}):",
        "",
        f"| cache | page | a request (of the Rust core) | a prefill step | {' | '.join(purposes)} | hit rate |",
        f"|---|---|---|---|{'---|' * len(purposes)}---|",
    ]
    for row in rows:
        cells = [row["cache"], row["page_tokens"], f"{row['request_us']} ({row['of_rust_core']})", row["step_us"]]
        cells += [row[f"{purpose}_us"] for purpose in purposes] + [f"{float(row['hit_rate']):.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _policies() -> list[str]:
    rows = read("prefix_policies")
    capacities = list(dict.fromkeys(row["capacity_tokens"] for row in rows))
    ideal = float(rows[0]["ideal_hit_rate"])
    lines = [
        f"**Eviction policies on the same trace**, hit rates of an ideal {ideal:.4f} ({_about(rows[0])}):",
        "",
        f"| | {' | '.join(f'{int(capacity):,} tokens' for capacity in capacities)} |",
        f"|---|{'---|' * len(capacities)}",
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [f"{float(row['hit_rate']):.4f}" for row in rows if row["policy"] == policy]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return lines


def _store() -> list[str]:
    rows = [row for row in read("store") if row["medium"] == "disk, O_DIRECT"]
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


def _lent() -> list[str]:
    rows = read("peer")
    return _table(
        "**A prefix from another engine's host**, until it is on the device, on three fleets of the demo's model, 8"
        f" processes over NIXL; `recompute` is that model's own forward pass ({_about(rows[0])}):",
        ("tokens", "MiB", "from", "ms, median", "p10 to p90", "of recompute"),
        (
            (
                row["tokens"],
                row["mib"],
                row["what"],
                row["median_ms"],
                f"{row['p10_ms']} to {row['p90_ms']}",
                row["of_recompute"],
            )
            for row in rows
        ),
    )


def _kept() -> list[str]:
    rows = read("keeper")
    names, by_model = list(dict.fromkeys(row["who"] for row in rows)), dict[str, list[dict[str, str]]]()
    for row in rows:
        by_model.setdefault(f"{row['model']}, {row['object_kib']} KiB", []).append(row)
    return _table(
        f"**A fleet that comes back to a keeper**, {rows[0]['gib']} GiB of pages that TP4 had committed, attached and"
        f" read rank by rank: medians, as multiples of the time of a memcpy by one thread ({_about(rows[0])}):",
        ("pages of a rank", *names[1:], "GB/s of memcpy"),
        (
            (
                model,
                *(row["of_memcpy"] for row in some[1:]),
                f"{float(some[0]['gib']) * 1.073741824 / float(some[0]['seconds']):.1f}",
            )
            for model, some in by_model.items()
        ),
    )


def _about(row: dict[str, str]) -> str:
    return f"{row['hardware']}; {row['versions']}"


#: The pages with numbers, and the block that goes between the markers of each.
PAGES = {
    README: lambda: "\n".join((headline(), "What machines have proved, or searched whole:", "", proved())),
    MEASUREMENTS: lambda: "\n".join((places(), shared(), numbers())),
    LIVE: scenarios,
    ORCHESTRATORS: orchestrated,
}


def updated(text: str, block: str) -> str:
    """A page with `block` between its markers."""
    return BLOCK.sub(lambda match: match[1] + block + match[2], text)


if __name__ == "__main__":
    options(__doc__).parse_args()
    for path, block in PAGES.items():
        path.write_text(updated(path.read_text(), block()))
