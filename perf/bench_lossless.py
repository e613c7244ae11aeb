"""A lossless code for the wire, on the KV of a trained model: its ratio, its speed, and what 1 Gb/s would make of it.

`python -m perf.bench_lossless [--tokens 1024] [--out FOLDER]`. SmolLM2 reads a page of docs/ in float32; its keys,
rotated as engines cache them, and values are rounded to bfloat16. The code: sign and mantissa of a number stay 8 bits;
of its exponent go 3 bits, the distance below the largest in its block, a byte a block. 7 stands for an escape: its
exponent follows in a list of planned length, a byte each, so that both sides know every length from the plan. A page
whose escapes do not fit its list goes as it is, after a flag. Blocks are 64 dims of a token, or 64 tokens of a dim.
Keys and values of each layer have a row, and all together; the code runs in numpy, in one thread. kvmover's wire has no
such code.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmover.plan import HOST, Costs
from kvmover.plan.cost import Posting
from perf.command_line import options
from perf.record import RESULTS, write

#: Numbers of a block, and of a page: 64 tokens of 3 heads of 64 dims.
BLOCK, PAGE_TOKENS = 64, 64

#: A code of 3 bits: the distance below the block's largest exponent, or an escape.
ESCAPE = 7

#: Bits of a code.
CODE_BITS = 3

#: Lengths of lists of escapes that are planned, as one in so many of a page's numbers.
LISTS = (32, 16, 8)

#: Bytes a second of the wire that costs, and chunks, both of `make wire`.
WIRE_BYTES_S, CHUNK_BYTES = 125e6, 2 << 20

#: Orders of a page: blocks of neighbours in it.
BY_TOKEN, BY_DIM = "64 dims of a token", "64 tokens of a dim"

ROUNDS = 5
Numbers = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Coded:
    """Numbers in the code. `kept`: sign and mantissa; `codes`: 3 bytes for 8 numbers; `bases`: one a block.

    `escapes`: exponents of the numbers whose code is an escape, in order.
    """

    kept: Bytes
    codes: Bytes
    bases: Bytes
    escapes: Bytes


def encode(numbers: Numbers) -> Coded:
    """Encode numbers, uint16 [block, BLOCK], that are bfloat16."""
    exponents = (numbers >> 7).astype(np.uint8)
    kept = (numbers >> 8 & 0x80 | numbers & 0x7F).astype(np.uint8)
    bases = exponents.max(1)
    codes = np.minimum(bases[:, None] - exponents, ESCAPE)
    words = np.zeros(codes.size // 8, np.uint32)
    for number in range(8):
        words |= codes.reshape(-1, 8)[:, number].astype(np.uint32) << np.uint32(CODE_BITS * number)
    packed = np.ascontiguousarray(words.view(np.uint8).reshape(-1, 4)[:, :CODE_BITS])
    return Coded(kept, packed, bases, exponents[codes == ESCAPE])


def decode(coded: Coded) -> Numbers:
    """Decode what `encode` returned."""
    words = np.zeros((len(coded.codes), 4), np.uint8)
    words[:, :CODE_BITS] = coded.codes
    codes = np.empty((len(words), 8), np.uint8)
    for number in range(8):
        codes[:, number] = words.view(np.uint32)[:, 0] >> np.uint32(CODE_BITS * number) & np.uint32(ESCAPE)
    exponents = (coded.bases[:, None] - codes.reshape(-1, BLOCK)).astype(np.uint16)
    exponents.reshape(-1)[codes.reshape(-1) == ESCAPE] = coded.escapes
    kept = coded.kept.astype(np.uint16)
    return ((kept & 0x80) << 8 | exponents << 7 | kept & 0x7F).astype(np.uint16)


def planned_bytes(count: int, listed: int) -> int:
    """Returns the bytes of `count` numbers in the code with a list for one escape in `listed`.

    12,288 numbers and a list for one in 16: 12,288 + 4,608 + 192 + 768 are 17,856 of 24,576.
    """
    return count + count * CODE_BITS // 8 + count // BLOCK + count // listed


def pages_of(numbers: Numbers, blocks: str) -> Numbers:
    """Returns numbers [token, head, dim] as pages, uint16 [page, number of a page], in the order of blocks."""
    tokens, heads, dims = len(numbers) // PAGE_TOKENS * PAGE_TOKENS, *numbers.shape[1:]
    paged = numbers[:tokens].reshape(-1, PAGE_TOKENS, heads, dims)
    return np.ascontiguousarray(paged if blocks == BY_TOKEN else paged.transpose(0, 2, 3, 1)).reshape(len(paged), -1)


def row(of: str, blocks: str, pages: Numbers) -> dict[str, object]:
    """Returns the code's measures of pages, uint16 [page, number of a page]. AssertionError unless they come back.

    `fit_16`: the part of pages whose escapes fit a list for one number in 16; `ratio_16`: with the others as they are.
    """
    blocked = pages.reshape(-1, BLOCK)
    taken: list[tuple[float, float]] = []
    coded = encode(blocked)
    for _ in range(ROUNDS):
        began = time.thread_time()
        coded = encode(blocked)
        half = time.thread_time()
        back = decode(coded)
        taken.append((half - began, time.thread_time() - half))
        assert (back == blocked).all(), f"{of} did not come back"
    exponents = (blocked >> 7).astype(np.uint8)
    escaped = (exponents.max(1)[:, None] - exponents >= ESCAPE).reshape(pages.shape).sum(1)
    measured: dict[str, object] = {"of": of, "blocks": blocks, "mib": round(pages.nbytes / 2**20, 2)}
    measured["escapes"] = round(len(coded.escapes) / pages.size, 5)
    for listed in LISTS:
        fit = float((escaped <= pages.shape[1] // listed).mean())
        size = fit * planned_bytes(pages.shape[1], listed) + (1 - fit) * pages.shape[1] * 2
        measured[f"fit_{listed}"], measured[f"ratio_{listed}"] = round(fit, 4), round(pages.shape[1] * 2 / size, 3)
    for name, seconds in zip(("encode_gb_s", "decode_gb_s"), zip(*taken, strict=True), strict=True):
        measured[name] = round(pages.nbytes / median(seconds) / 1e9, 3)
    return measured


def on_the_wire(measured: dict[str, Any]) -> dict[str, object]:
    """Returns the cost model's milliseconds of 32 MiB at 1 Gb/s, as it is and in the best of the planned lengths.

    The code is a gather and a scatter at its own speed, of the bytes before it; the wire carries the bytes after it.
    """
    nbytes = 32 << 20
    plain = replace(HOST, wire_rate=WIRE_BYTES_S / 1e6, chunk_bytes=CHUNK_BYTES, posting=Posting.SOCKET)
    ratio = max(float(measured[f"ratio_{listed}"]) for listed in LISTS)
    coded: Costs = replace(
        plain,
        wire_rate=plain.wire_rate * ratio,
        gather_rate=float(measured["encode_gb_s"]) * 1e3,
        scatter_rate=float(measured["decode_gb_s"]) * 1e3,
    )
    before, after = (costs.packed_us(nbytes, costs.chunks(nbytes)) / 1e3 for costs in (plain, coded))
    return {"wire_ms": round(before, 1), "wire_coded_ms": round(after, 1), "wire_gain": round(before / after, 3)}


def kv_of_a_text(tokens: int) -> Iterator[tuple[str, Numbers]]:
    """Yield the keys, and then the values, of each layer of SmolLM2 over a text, uint16 [token, head, dim]: bfloat16.

    Raises MissingLibrary without its packages.
    """
    import torch

    from kvmover.tools.demo.model import ContiguousCache, Transformer
    from kvmover.tools.demo.smollm2 import SMOLLM2, Tongue, unpack

    text = (Path(__file__).parent.parent / "docs" / "concepts.md").read_text()
    prompt = Tongue.of_package().tokens(text)[:tokens]
    cache = ContiguousCache()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = Transformer.alone(replace(SMOLLM2, checkpoint=str(unpack(Path(folder)))))
        model.prefill(prompt, cache)
    for layer in range(SMOLLM2.layers):
        keys, values = cache.read(layer, len(prompt))
        rotated = model.rotated(keys, 0)
        for name, rows in (("keys", rotated), ("values", values)):
            rounded = rows.to(torch.bfloat16).contiguous().view(torch.int16)
            yield f"{name} of layer {layer}", rounded.numpy().view(np.uint16)


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("--tokens", type=int, default=1024)
    asked.add_argument("--out", type=Path, default=RESULTS)
    given = asked.parse_args()
    from kvmover.tools.demo.smollm2 import missing

    if lacking := missing():
        print(f"not measured: SmolLM2 needs {', '.join(lacking)}, which `make demo MODEL=smollm2` installs")
        return
    found = dict(kv_of_a_text(given.tokens))
    rows: list[dict[str, object]] = []
    for blocks in (BY_TOKEN, BY_DIM):
        paged = {of: pages_of(numbers, blocks) for of, numbers in found.items()}
        rows += [row(of, blocks, pages) for of, pages in paged.items()]
        for kind in ("keys", "values", ""):
            together = np.concatenate([pages for of, pages in paged.items() if of.startswith(kind)])
            measured = row(kind or "keys and values", blocks, together)
            rows.append({**measured, **on_the_wire(measured)})
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    blank = dict.fromkeys(rows[-1], "")
    print(f"wrote {write('lossless', [{**blank, **each, 'by': 'numpy, one thread'} for each in rows], given.out)}")


if __name__ == "__main__":
    main()
