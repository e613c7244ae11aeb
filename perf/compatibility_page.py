"""docs/compatibility.md, written from the contracts with the engines and the last matrix of live pairs.

`python -m perf.compatibility_page` updates the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvmover.engines.common import Contract
from kvmover.engines.sglang.sglang_contract import SGLANG
from kvmover.engines.transformers.transformers_contract import TRANSFORMERS
from kvmover.engines.vllm.vllm_contract import VLLM
from perf.command_line import options
from perf.record import read

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"

HEAD = """\
# Releases of the engines

A plug-in knows every name of its engine that it uses, and looks for all of them when the engine loads it.

| The installed release | What happens |
|---|---|
| was tested with the plug-in, or is a fix of one that was | it loads |
| was not tested, and has all names | it loads, with a line in the log; `KVMOVER_ENGINE=strict` refuses it |
| lacks a name | the plug-in is refused with the name, and the others load |

Names prove nothing about bytes. So, before anything is moved, a plug-in compares addresses, sizes and dtype of blocks
with the engine's own description: vLLM's connector with `KVCacheConfig` and its layout, SGLang's HiCache storage with
the runs that zero-copy backends get, its linker and tiers with the buffers that prefill/decode would register, for
plain attention and latents. A difference refuses the plug-in with both values. Prefill/decode takes its addresses from
`KVArgs`, SGLang's one description of them there.

`make engines ENGINE=vllm VERSION=0.31.0` runs the plug-ins' checks in another release, whose Python it lays over
the engine's environment, and `make live-pair PREFILL=vllm==0.31.0 DECODE=sglang==0.5.22` serves 20 prompts through
two. This page is written by `python -m perf.compatibility_page`.
"""

SCANS = """
## The newest releases, read

`make scan ENGINE=vllm` takes the newest wheel that the index offers, installs and imports nothing of it, and ends with
1 if a plug-in lacks a name (`perf/results/scanned_releases.csv`). For the releases of the table above it says what
their imports say.
"""

NAMES = """
In SGLang 0.5.20 a decode holds only the pages of requests that it gave up itself, and its setting for that is off.
There the plug-in tells the prefill of every failure before SGLang decides, and so has all pages held until no peer can
write to them; `SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0` refuses the plug-in as in later releases. 0.5.18
holds no pages, and its prefill/decode is refused. In 0.5.18 weights that were updated have no version, and a store
then shares nothing.

Dynamo 1.6.1 pins vLLM 0.31.0 with NIXL 1.4.1 and SGLang 0.5.21 with NIXL 1.5.0, which are inside, but for SGLang's
radix cache. llm-d's image of August 2026 has vLLM 0.26.0, and the extra `llm` of Ray 2.60.0 pins vLLM 0.29.0, which
are outside.
[Behind an orchestrator](orchestrators.md) has what was run.
"""

PAIRS = """\
## Prefill and decode of two releases

Greedy tokens and log probabilities of 20 prompts, beside those of the decode's release alone, on a CPU
(`perf/results/live_releases.csv`). vLLM's own connector refuses to meet another release.
"""


STORES = """
## A page store behind vLLM's offloading, through an upgrade

Chunks that one release has stored, read by the other (`perf/results/live_upgrades.csv`). vLLM 0.30 and 0.31 lay the
parts of several ranks in the order of their devices' numbers: such chunks are read by the same release alone.
"""


def page() -> str:
    """Returns the page."""
    releases = [HEAD, *_plugins([VLLM, SGLANG, TRANSFORMERS]), NAMES, SCANS, *_scans(), ""]
    return "\n".join([*releases, PAIRS, *_pairs(), STORES, *_upgrades()]) + "\n"


def _plugins(contracts: Sequence[Contract]) -> list[str]:
    lines = ["## A row a plug-in", "", "| Engine | Plug-in | Tested with | Names that it uses |", "|---|---|---|---|"]
    for contract in contracts:
        for plugin, releases in contract.tested.items():
            needs = (need for need in (*contract.needs, *contract.hooks) if plugin in need.plugins)
            names = sum(max(1, len(need.has)) for need in needs)
            lines.append(f"| {contract.engine} | {plugin} | {', '.join(releases)} | {names} |")
    return lines


def _scans() -> list[str]:
    lines = ["| Engine | Release | Plug-in | Names | Left |", "|---|---|---|---|---|"]
    for row in read("scanned_releases"):
        left = row["lacking"].replace(" ", ", ") or "none"
        lines.append(f"| {row['engine']} | {row['release']} | {row['plugin']} | {row['names']} | {left} |")
    return lines


def _pairs() -> list[str]:
    rows = sorted(read("live_releases"), key=lambda row: (row["prefill"], row["decode"]))
    lines = ["| Prefill | Decode | Equal | Moved |", "|---|---|---|---|"]
    for row in rows:
        moved = f"{int(row['moved_bytes']) / 1e6:.1f} MB"
        lines.append(f"| {row['prefill']} | {row['decode']} | {row['same']} of {row['requests']} | {moved} |")
    return lines


def _upgrades() -> list[str]:
    lines = ["| Stored by | Read by | Equal | Chunks read |", "|---|---|---|---|"]
    for row in sorted(read("live_upgrades"), key=lambda row: (row["writer"], row["reader"])):
        equal = f"{row['same']} of {row['requests']}"
        lines.append(f"| {row['writer']} | {row['reader']} | {equal} | {row['read_chunks']} |")
    return lines


if __name__ == "__main__":
    options(__doc__).parse_args()
    PAGE.write_text(page())
