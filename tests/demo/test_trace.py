"""A trace keeps its shared prefixes at any scale, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmover.demo.trace import TraceError, TraceScale, page_of, read_trace
from kvmover.errors import KvmoverError


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def request(length: int, hash_ids: list[int], output: int = 10, timestamp: int = 0) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": hash_ids}


def test_hash_ids_expand_to_512_tokens_cut_at_the_input_length(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", request(700, [4, 9], output=33, timestamp=1500))
    (entry,) = read_trace(path, TraceScale(vocab=1000))
    assert (entry.timestamp_ms, len(entry.tokens), entry.output_tokens) == (1500, 700, 33)
    assert entry.tokens[:512] == page_of(4, TraceScale(vocab=1000))
    assert entry.tokens[512:] == page_of(9, TraceScale(vocab=1000))[:188]


@pytest.mark.parametrize("factor", [1.0, 0.1, 0.004, 0.0001])
def test_requests_share_exactly_the_pages_they_shared_before_scaling(tmp_path: Path, factor: float) -> None:
    path = written(
        tmp_path / "trace.jsonl", request(1536, [0, 1, 2]), "", request(1400, [0, 1, 3]), request(600, [5, 1])
    )
    scale = TraceScale(vocab=50021, factor=factor)
    left, right, other = (entry.tokens for entry in read_trace(path, scale))
    assert len(left) == 3 * scale.page_tokens
    assert scale.page_tokens == max(1, round(512 * factor))
    shared = 2 * scale.page_tokens
    assert left[:shared] == right[:shared]
    assert left[shared] != right[shared]
    assert other[0] != left[0]
    assert other[scale.page_tokens] == left[scale.page_tokens]


def test_no_two_pages_hold_the_same_tokens_shifted_or_not() -> None:
    scale = TraceScale(vocab=512, factor=0.05)
    grams = {page_of(page, scale)[at : at + 4] for page in range(200) for at in range(scale.page_tokens - 3)}
    assert len(grams) > 0.999 * 200 * (scale.page_tokens - 3)
    assert len({token for page in range(200) for token in page_of(page, scale)}) == 512


def test_requests_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", request(5, [1]), "not a request")
    entries = read_trace(path, TraceScale(512))
    assert len(next(entries).tokens) == 5
    with pytest.raises(TraceError, match=r"trace\.jsonl line 2: .*not a request"):
        next(entries)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (request(0, []), "input_length 0 is below 1"),
        (request(513, [1]), "1 hash_ids for input_length 513, which is 2 pages"),
        (request(5, [-1]), "smallest of hash_ids -1 is below 0"),
        (request(5, [1], output=-2), "output_length -2 is below 0"),
        ({"timestamp": 0, "input_length": 5, "hash_ids": [1]}, "output_length"),
        ({**request(5, [1]), "timestamp": "noon"}, "noon"),
        ('{"timestamp": 1', "truncated"),
        ('"\\udead\x80', "line 2"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_value(tmp_path: Path, line: object, message: str) -> None:
    path = written(tmp_path / "trace.jsonl", request(5, [1]), line)
    with pytest.raises(TraceError, match="line 2") as caught:
        list(read_trace(path, TraceScale(512)))
    assert message in str(caught.value)
    assert isinstance(caught.value, KvmoverError)
    assert isinstance(caught.value, ValueError)


def test_a_scale_that_grows_or_empties_a_trace_is_refused() -> None:
    with pytest.raises(TraceError, match=r"factor=1\.5"):
        TraceScale(512, 1.5)
    with pytest.raises(TraceError, match="vocab=1"):
        TraceScale(1)
