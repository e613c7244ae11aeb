"""The table of KV that moves, is shared and is kept: a row a part, from perf/results."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from perf.record import first, passed, read

#: Words in the names of the live scenarios that show a part.
_MOVES = ("a running request moves", "where requests move")
_PEERS = ("host memory of",)
_HINTS = ("a pinned session", "a session under")
_TURNS = ("decode to the next prefill", "a turn that comes too late")
_KEEPER = ("keeper,",)
_ROLLING = ("replaced under load",)


def shared() -> str:
    """A row for each of seven parts: what was measured, beside what, and how many live answers were right."""
    lines = [
        "**KV that moves, is shared and is kept.** When to use which part: [tuning](tuning.md#move-share-or-keep-kv).\n"
        "Right: live answers that equal a plain server's in every token, of all:",
        "",
        "| Part | kvmover | beside it | right |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in _parts()), ""])


def _parts() -> Iterator[tuple[str, str, str, str]]:
    yield from _migration()
    yield _peers()
    yield "hints: a session's prefix stays while a tool runs", _said(_HINTS), "", _right(_HINTS)
    yield _turns()
    yield _keeper()
    yield (
        "rolling upgrade: two vLLM servers of two shapes, one drained, one killed",
        _said(_ROLLING),
        "",
        _right(_ROLLING),
    )
    yield _predictions()


def _said(words: tuple[str, ...]) -> str:
    """By the first of the live scenarios that have one of `words` in their name."""
    return next((row["said"] for row in passed("live") if any(each in row["scenario"] for each in words)), "")


def _right(words: tuple[str, ...]) -> str:
    """Of the live scenarios that have one of `words` in their name, in the last whole run."""
    rows = [row for row in passed("live") if any(each in row["scenario"] for each in words)]
    requests, same = (sum(int(row[name]) for row in rows) for name in ("requests", "same"))
    return f"{same} of {requests}" if rows else "not in the last run"


def _migration() -> Iterator[tuple[str, str, str, str]]:
    moved, stopped = (first("migrate", way=way) for way in ("copied while it runs", "stopped and copied"))
    pause = "its pause, p50 and p99"
    yield (
        f"a running request of {int(moved['tokens']):,} tokens moves to another process: {pause}",
        f"{moved['pause_p50_ms']} and {moved['pause_p99_ms']} ms",
        f"stopped and copied: {stopped['pause_p50_ms']} and {stopped['pause_p99_ms']}",
        "",
    )
    ahead, whole = (first("live_moves", way=way) for way in ("copied while it decodes, then stopped", "stop and copy"))
    yield (
        f"the same between vLLM servers, by the router, at {ahead['token_ms']} ms a token",
        f"{ahead['pause_p50_ms']} and {ahead['pause_p99_ms']} ms",
        f"stopped and copied: {whole['pause_p50_ms']} and {whole['pause_p99_ms']}",
        _right(_MOVES),
    )


def _peers() -> tuple[str, str, str, str]:
    unlike, storage, computed = (
        f"{first('peer', tokens='1024', what=what)['median_ms']} ms"
        for what in ("peer, TP4 page 16 NHD to TP2 page 32 HND", "storage", "recompute")
    )
    asked = "peers: 1,024 tokens from a host of another TP, page size and order"
    return asked, unlike, f"from storage in the page cache: {storage}; computing them: {computed}", _right(_PEERS)


def _turns() -> tuple[str, str, str, str]:
    later = [row for row in read("live_turns") if row["turn"] != "1"]
    handed, computed = (
        f"{median(float(row['ttft_p50_ms']) for row in later if row['way'] == way):.0f} ms"
        for way in ("handed over", "computed")
    )
    asked = "decode to prefill: first token of a chat's turns 2 to 5 in vLLM, on two prefills in turn"
    return asked, handed, f"computing it: {computed}", _right(_TURNS)


def _keeper() -> tuple[str, str, str, str]:
    rows = [row for row in read("keeper") if row["who"] == "keeper, TP8 in place of TP4"]
    large, small = (sorted(rows, key=lambda row: int(row["object_kib"]))[at] for at in (-1, 0))
    ms = 1e3 * float(large["seconds"])
    return (
        f"keeper: TP8 takes {float(large['gib']):g} GiB that a killed TP4 had committed",
        f"{ms:.0f} ms; of memcpy {large['of_memcpy']}",
        f"memcpy: {ms / float(large['of_memcpy']):.0f} ms; of pages of {small['object_kib']} KiB"
        f" instead of {int(large['object_kib']):,}: {small['of_memcpy']} of memcpy",
        _right(_KEEPER),
    )


def _predictions() -> tuple[str, str, str, str]:
    rows = read("advise")
    p50, p99 = ([float(row[f"{name}_ratio"]) for row in rows] for name in ("p50", "p99"))
    return (
        f"`kvmover advise`: predicted of measured, {sum(int(row['requests']) for row in rows):,} requests",
        f"p50: {min(p50):.2f} to {max(p50):.2f}",
        f"p99: {min(p99):.2f} to {max(p99):.2f}",
        "",
    )
