"""A trace keeps its shared prefixes at any scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmover.tools.demo.requests import Traced, TraceError, TraceScale, block_of, prompt_of
from kvmover.tools.replay import read_trace


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def request(length: int, hash_ids: list[int], output: int = 10, timestamp: int = 0) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": hash_ids}


def test_hash_ids_expand_to_512_tokens_cut_at_the_input_length(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", request(700, [4, 9], output=33, timestamp=1500))
    ((prompt, answer_tokens),) = Traced.read(path, TraceScale(vocab=1000), 1, 1000)
    assert (len(prompt), answer_tokens) == (700, 8)
    assert prompt[:512] == block_of(4, TraceScale(vocab=1000))
    assert prompt[512:] == block_of(9, TraceScale(vocab=1000))[:188]


@pytest.mark.parametrize("factor", [1.0, 0.1, 0.004, 0.0001])
def test_requests_share_exactly_the_pages_they_shared_before_scaling(tmp_path: Path, factor: float) -> None:
    path = written(
        tmp_path / "trace.jsonl", request(1536, [0, 1, 2]), "", request(1400, [0, 1, 3]), request(600, [5, 1])
    )
    scale = TraceScale(vocab=50021, factor=factor)
    left, right, other = (prompt_of(entry, scale) for entry in read_trace(path))
    assert len(left) == 3 * scale.block_tokens
    assert scale.block_tokens == max(1, round(512 * factor))
    shared = 2 * scale.block_tokens
    assert left[:shared] == right[:shared]
    assert left[shared] != right[shared]
    assert other[0] != left[0]
    assert other[scale.block_tokens] == left[scale.block_tokens]


def test_no_two_pages_hold_the_same_tokens_shifted_or_not() -> None:
    scale = TraceScale(vocab=512, factor=0.05)
    grams = {block_of(page, scale)[at : at + 4] for page in range(200) for at in range(scale.block_tokens - 3)}
    assert len(grams) > 0.999 * 200 * (scale.block_tokens - 3)
    assert len({token for page in range(200) for token in block_of(page, scale)}) == 512


def test_a_scale_that_grows_or_empties_a_trace_is_refused() -> None:
    with pytest.raises(TraceError, match=r"factor=1\.5"):
        TraceScale(512, 1.5)
    with pytest.raises(TraceError, match="vocab=1"):
        TraceScale(1)
