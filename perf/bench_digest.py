"""The digest on a GPU: fused with the move, and alone, beside the plain row mover and a clone of the same bytes.

`python -m perf.bench_digest [--out FOLDER] [--rounds N]`. `of_plain` is the time relative to the plain move in the same
run; a read alone moves half the bytes. Several tile sizes are timed, so that the best can be made the rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvmover.kernels import digest
from kvmover.kernels.digest_reference import End, Logical
from kvmover.kernels.launch import Prepared, RowConfig
from perf.bench_kernels import launcher
from perf.cases import DEEPSEEK, INDEX_KEYS, LLAMA, Case, Move, moves
from perf.gpu_time import interleaved, need_gpu
from perf.measured_code import columns
from perf.record import RESULTS, write

CASES = (
    Case("Llama-3-70B", LLAMA, 2, 8, 64),
    Case("Llama-3-70B", LLAMA, 2, 8, 1),
    Case("DeepSeek-V3 MLA", DEEPSEEK, 1, 1, 64),
    Case("DeepSeek-V3 MLA", DEEPSEEK, 1, 1, 1),
    Case("V3.2 keys of 132 B", INDEX_KEYS, 1, 1, 64),
)
CONFIGS = (RowConfig(4096, 4), RowConfig(8192, 4), RowConfig(16384, 8), RowConfig(16384, 4))

#: Under a budget of SMs, of which there are as many programs.
SMS = 8
BUDGETED = (RowConfig(16384, 8), RowConfig(32768, 8), RowConfig(32768, 16), RowConfig(65536, 16))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--rounds", type=int, default=15)
    chosen = options.parse_args()
    need_gpu("perf.bench_digest")
    lines: list[dict[str, object]] = []
    for move in moves(CASES):
        lines += measured(move, chosen.rounds)
        write("bench_digest", lines, chosen.out)
    print(f"wrote {chosen.out / 'bench_digest.csv'}")


def coordinates(move: Move) -> list[Logical]:
    """Of the gather's regions: whole pages only, in order, planes and heads from 0 on."""
    positions = np.arange(len(move.pages), dtype=np.int64) * move.case.page_tokens
    heads = move.leg_heads[1]
    return [Logical(np.arange(each.planes), positions, heads_in_row=heads // each.heads) for each in move.gather]


def measured(move: Move, rounds: int) -> list[dict[str, object]]:
    """One case: check that both ends have one digest, then time."""
    logicals, out = coordinates(move), torch.zeros(1, dtype=torch.int64, device="cuda")
    check(move, logicals)
    cases: dict[str, Callable[[], object]] = {"clone": lambda: torch.clone(move.packed)}
    launches = {"plain move": launcher(move.gather, None), f"plain move, {SMS} SMs": launcher(move.gather, SMS)}
    for config, sms in (*((config, None) for config in CONFIGS), *((config, SMS) for config in BUDGETED)):
        label = f"{config.block_bytes >> 10} KiB, {config.warps} warps" + (f", {sms} SMs" if sms else "")
        launches[f"move and digest, {label}"] = digester(move, logicals, out, config, sms, None)
        launches[f"digest, {label}"] = digester(move, logicals, out, config, sms, "src")
    cases |= {what: prepared.run for what, prepared in launches.items()}
    spreads = interleaved(cases, rounds)
    lines: list[dict[str, object]] = []
    for what, spread in spreads.items():
        line: dict[str, object] = {
            "case": move.case.text(),
            "mib": move.nbytes >> 20,
            "what": what,
            "gb_per_s": round(move.nbytes / spread.median / 1e9, 1),
            "p10_gb_per_s": round(move.nbytes / spread.high / 1e9, 1),
            "p90_gb_per_s": round(move.nbytes / spread.low / 1e9, 1),
            "of_plain": round(spread.median / spreads[plain_of(what)].median, 3),
            **columns(launches.get(what)),
        }
        print(f"{line['case']:<52} {what:<34} {line['gb_per_s']:>8} GB/s {line['of_plain']:>6} of plain", flush=True)
        lines.append(line)
    return lines


def plain_of(what: str) -> str:
    """The plain move under the same budget."""
    return f"plain move, {SMS} SMs" if what.endswith(" SMs") else "plain move"


def digester(
    move: Move, logicals: list[Logical], out: torch.Tensor, config: RowConfig, sms: int | None, reads: End | None
) -> Prepared:
    """Return the launch alone, as the plain move's is. `reads`: an end, and no copy."""
    prepared = digest.prepare(move.gather, logicals, out, config, sms, reads)
    assert prepared is not None
    return prepared


def check(move: Move, logicals: list[Logical]) -> None:
    """The digest of what is moved is that of what has arrived, and not that of other bytes."""
    outs = torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    digest.move_and_digest(move.gather, logicals, outs[0])
    digest.digest(move.gather, logicals, "dst", outs[1])
    move.packed[len(move.packed) // 3] ^= 1
    digest.digest(move.gather, logicals, "dst", outs[2])
    assert int(outs[0]) == int(outs[1]), f"{move.case.text()}: digests of the two ends differ"
    assert int(outs[0]) != int(outs[2]), f"{move.case.text()}: a flipped bit was not seen"


if __name__ == "__main__":
    main()
