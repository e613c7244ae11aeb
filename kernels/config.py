"""RowConfig says how the row mover is launched: as measured on this GPU or one like it, or by a rule."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: One JSON file a GPU, written by perf/autotune.py.
TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class RowConfig:
    """`block_bytes` a tile and `warps` a program.

    Without a budget every tile is a program: 3 to 9 points of a clone's bandwidth faster than a persistent grid on an
    H200, because the hardware scheduler replaces finished programs at once. A budget of SMs is a grid of as many
    programs: they go to idle SMs first, so several small ones for each SM would run on several times as many SMs.
    """

    block_bytes: int = 4096
    warps: int = 4

    def programs(self, tiles: int, sms: int | None, device: torch.device) -> int:
        """Grid size for `tiles` under a budget of `sms` multiprocessors (None: no budget)."""
        import torch

        if sms is None:
            return tiles
        if device.type != "cpu":
            sms = min(sms, torch.cuda.get_device_properties(device).multi_processor_count)
        return min(tiles, sms)


@dataclass(frozen=True, slots=True)
class RowKind:
    """What decides the best launch: the bytes of a row, and of a unit's rows that lie together."""

    row_bytes: int
    unit_bytes: int

    def distance(self, other: RowKind) -> float:
        """Doublings between two kinds. Units count more: below a tile's size they change how a tile reads."""
        return abs(log2(self.row_bytes / other.row_bytes)) + 2 * abs(log2(self.unit_bytes / other.unit_bytes))


@dataclass(frozen=True, slots=True)
class Tuned:
    """One measured best."""

    kind: RowKind
    budgeted: bool
    config: RowConfig


def device_key(name: str) -> str:
    """`NVIDIA H200` as a file name: nvidia-h200."""
    return "-".join(name.lower().split())


@cache
def tuned(key: str) -> tuple[Tuned, ...]:
    """The table of a GPU; empty where it was never tuned."""
    path = TUNED / f"{key}.json"
    if not path.exists():
        return ()
    entries = json.loads(path.read_text())["entries"]
    return tuple(Tuned(RowKind(*e["kind"]), e["sms"] is not None, RowConfig(*e["best"])) for e in entries)


@cache
def choose(kind: RowKind, sms: int | None, device: torch.device) -> RowConfig:
    """The nearest measured configuration of this GPU, else the rule.

    The rule: 4 KiB tiles, two 16-byte accesses a thread, were within 2 % of the best for every kind of row on an H200;
    a program that has an SM to itself moves most, 20 to 27 GB/s, with 32 KiB tiles and 8 warps.
    """
    if device.type != "cpu":
        import torch

        table = [t for t in tuned(device_key(torch.cuda.get_device_name(device))) if t.budgeted == (sms is not None)]
        if table:
            return min(table, key=lambda entry: entry.kind.distance(kind)).config
    return RowConfig() if sms is None else RowConfig(32768, 8)
