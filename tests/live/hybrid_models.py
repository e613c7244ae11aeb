"""Names of the models with layers of recurrent states beside attention, and what tables say of each."""

from __future__ import annotations

from collections.abc import Mapping

#: Of one group each rank has a copy; two are divided by TP2.
KINDS: Mapping[str, str] = {
    "convolutions": "short convolutions",
    "scans": "Mamba-2, 1 group",
    "scans-of-two-groups": "Mamba-2, 2 groups",
    "deltas": "gated delta networks",
}

#: The ones that SGLang's fixture has operators for.
SGLANG_KINDS = ("convolutions", "scans", "scans-of-two-groups")
