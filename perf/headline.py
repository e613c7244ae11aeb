"""The table of the README, and the one of the places where KV can live, from perf/results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perf.record import first, passed, read


def headline() -> str:
    """The block between the README's markers: a row for each question that a reader has first."""
    lines = ["| Measured | Unit | kvmover | Beside it |", "|---|---|---|---|"]
    lines += [f"| {question} | {unit} | {ours} | {theirs} |" for question, unit, ours, theirs in _headlines()]
    gpu, cpu = first("bench_kernels", what="kvmover"), first("transfer", of_contiguous="1.0")
    where = f"The first row: {gpu['hardware']}, {gpu['date']}; {of_code(gpu)} The others: {cpu['hardware']}."
    return "\n".join([*lines, "", where, ""])


def of_code(row: Mapping[str, str]) -> str:
    """Return the sentence that names the code which a row measured, and says if the launch has it still."""
    if row["commit"] == "unknown":
        return "commit unknown: the row mover has changed since, and what was measured is no longer in the tree."
    named = f"commit {row['commit']}, machine code {row['code']}"
    now = row.get("today", "")
    if now == row["code"]:
        return f"{named}, which is today's."
    return f"{named}, not compared with today's." if not now else f"{named}; today's is not that: {now}."


def _headlines() -> Iterator[tuple[str, str, str, str]]:
    yield from _on_a_gpu()
    yield from _between_processes()
    yield from _in_a_process()
    yield from _live()


def _on_a_gpu() -> Iterator[tuple[str, str, str, str]]:
    case = {"case": "Llama-3-70B, TP2 to TP8, NHD, page 64, scattered", "way": "gather"}
    ours, peer, aligned = (
        first("bench_kernels", what=what, **case)["gb_per_s"]
        for what in ("kvmover", "SGLang staging, released", "SGLang staging, aligned")
    )
    yield (
        "gather of Llama-3-70B pages from TP2 for TP8, rows of 256 B, one launch of 1,280 MiB on all SMs",
        "GB/s",
        f"{ours}",
        f"the fastest clone of the day: {best_clone()}; SGLang's staging kernel: {peer}, aligned {aligned}",
    )


def _between_processes() -> Iterator[tuple[str, str, str, str]]:
    direct, whole = first("transfer", what="direct", mib="64"), first("transfer", what="one contiguous write", mib="64")
    packed = first("transfer", what="packed, 16 MiB chunks", mib="64")
    yield (
        "64 MiB in rows of 512 B between two processes over NIXL",
        "GB/s",
        packed["gb_per_s"],
        f"a descriptor a row: {direct['gb_per_s']}; one contiguous write: {whole['gb_per_s']}",
    )
    equal = {"case": "mla-64"}
    auto, direct, paged = (
        first("collectivex", contender=who, **equal)
        for who in ("kvmover auto, pushed", "kvmover direct, pushed", "NIXL paged, written")
    )
    yield (
        "equal layouts on one host, 176 MB in MLA pages of 64 tokens",
        "GB/s",
        f"{auto['gb_per_s']}, pools mapped",
        f"raw NIXL, a descriptor a page and layer: {paged['gb_per_s']}; kvmover so: {direct['gb_per_s']}",
    )


def _in_a_process() -> Iterator[tuple[str, str, str, str]]:
    at_64 = {
        row["contender"]: row for row in read("prefix_trace") if (row["page_tokens"], row["capacity"]) == ("64", "3M")
    }
    for who, how, other in (
        ("kvmover", "", "sglang rust core"),
        ("kvmover in sglang", ", at SGLang's own interface", "sglang rust core"),
        ("kvmover in sglang events", ", at SGLang's own interface with KV events", "sglang rust core events"),
    ):
        if who in at_64:
            yield (
                f"prefix tree on Mooncake's conversation trace, 3M tokens{how}",
                "requests/s",
                f"{int(at_64[who]['requests_per_s']):,}",
                f"SGLang's Rust core: {int(at_64[other]['requests_per_s']):,}",
            )
    pages = {"medium": "disk, O_DIRECT", "page_kib": "1024"}
    mine, theirs = (first("store", who=who, what="get", **pages)["gb_s"] for who in ("kvmover nixl", "sglang nixl"))
    yield (
        "page store on a disk, reading pages of 1 MiB, every byte checked",
        "GB/s",
        mine,
        f"SGLang's NIXL store, unchecked: {theirs}",
    )


def _live() -> Iterator[tuple[str, str, str, str]]:
    yield from _exchanged()
    for engine, name, way in (("sglang", "SGLang", "nixl backend"), ("vllm", "vLLM", "NixlConnector")):
        mine, theirs = (
            first("live_peers", engine=engine, way=who, machine="alone", arrivals_per_s="5")["ttft_p50_ms"]
            for who in ("kvmover", way.split()[0])
        )
        asked = f"{name}, live, from prefill to decode without a GPU: first token at 5 prompts a second of 50 to 900"
        yield asked, "ms", mine, f"{name}'s {way}: {theirs}"


def _exchanged() -> Iterator[tuple[str, str, str, str]]:
    """What engines of unlike make did for each other in the last whole run of live servers, where that had any."""
    rows = [row for row in passed("live") if row["engine"] in ("sglang-vllm", "vllm-sglang")]
    if rows:
        requests, same = (sum(int(row[name]) for row in rows) for name in ("requests", "same"))
        asked = "SGLang and vLLM for each other, live: answers whose every token is the decode engine's own"
        yield asked, "answers", f"{same:,} of {requests:,}", "not offered"


#: What each place of perf/results/places.csv survives, in words.
_SURVIVES = {
    "host memory": "nothing: it is the process's",
    "tmpfs": "the process, on its machine",
    "disk": "a power cut, once flushed",
    "S3, moto": "the machine, once flushed",
    "Mooncake, loopback TCP": "the process that wrote it, as long as its donor lives",
}


def places() -> str:
    """The table of where KV can live: a row a place that was measured."""
    lines = [
        "**Where KV can live, and what it survives there.** Pages of 1 MiB through the page store, digests checked,\n"
        "a flush after each put; the process's own memory beside them is a plain copy, in the same run:",
        "",
        "| Place | put, GB/s | get, GB/s | get, of the copy | one page got | it survives |",
        "|---|---|---|---|---|---|",
    ]
    rows = {(row["place"], row["what"]): row for row in read("places")}
    for place in dict.fromkeys(name for name, _ in rows):
        put, got = rows[place, "put"], rows[place, "get"]
        cells = (put["gb_per_s"], got["gb_per_s"], got["of_memcpy"], f"{got['page_p50_ms']} ms", _SURVIVES[place])
        lines.append(f"| {place} | {' | '.join(cells)} |")
    about = next(iter(rows.values()))
    lines += ["", f"moto is a server of tests, in Python: no measure of any service. {about['hardware']}.", ""]
    return "\n".join(lines)


def best_clone() -> float:
    """GB/s of the fastest copy of dense bytes in all runs on the GPU: the one beside a move is too noisy a measure."""
    clones = [row["gb_per_s"] for row in read("bench_kernels") if row["what"] == "clone"]
    return max(map(float, [*clones, first("roofline", what="clone, device to device")["gb_per_s"]]))
