"""A replay without limits reuses exactly what a brute-force comparison of all prompts says can be reused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmover.cache.ledger import Loss
from kvmover.cache.prefix import FIFO, HAZARD, WriteThrough
from kvmover.tools.replay import ReplayConfig, Report, read_trace, replay
from kvmover.tools.replay.ideal import Ideal, new_ideal
from tests.tools.replay.made import brute_force, common, generated

pytestmark = pytest.mark.usefixtures("used_core")
#: A folder that holds `mooncake_conversation_trace.jsonl`.
TRACES = Path(os.environ.get("KVMOVER_TRACES", "traces"))


@pytest.mark.parametrize("page_tokens", [1, 16, 48, 64, 512, 700])
def test_the_hits_of_a_generated_trace_are_those_of_brute_force(page_tokens: int) -> None:
    requests = generated(page_tokens, count=40)
    report = replay(requests, ReplayConfig(page_tokens))
    assert report.totals.device_tokens == brute_force(requests, page_tokens) > 0
    assert report.totals.hit_rate == pytest.approx(report.ideal_hit_rate)


@given(st.integers(0, 2**32))
@settings(max_examples=15)
def test_the_ideal_by_hash_ids_is_the_one_by_tokens(seed: int) -> None:
    requests, ideal = generated(seed, count=12), new_ideal()
    reused = [ideal.serve(each.hash_ids, each.lengths(), each.block_tokens, 64)[0] for each in requests]
    earlier = list[list[int]]()
    for request, found in zip(requests, reused, strict=True):
        tokens = request.tokens().tolist()
        assert found == max((common(tokens, prompt) for prompt in earlier), default=0)
        earlier.append(tokens)


block_of = st.tuples(st.integers(0, 3), st.sampled_from([8, 8, 8, 8, 7, 3, 1]))


@given(st.lists(st.lists(block_of, min_size=1, max_size=8), max_size=12), st.sampled_from([1, 2, 3, 4, 5, 8, 11]))
@settings(max_examples=100)
def test_pages_have_equal_numbers_where_all_tokens_up_to_their_ends_are_equal(
    prompts: list[list[tuple[int, int]]], page_tokens: int
) -> None:
    """Blocks of 8 tokens, some cut short anywhere in a prompt. What a core built here says is what Python says."""
    ideals, names, numbers = [Ideal(), new_ideal()], dict[tuple[int, ...], int](), dict[int, tuple[int, ...]]()
    for prompt in prompts:
        hash_ids, lengths = zip(*prompt, strict=True)
        (reused, row), told = (ideal.serve(hash_ids, lengths, 8, page_tokens) for ideal in ideals)
        assert (reused, row) == told
        tokens = [block * 8 + at for block, length in prompt for at in range(length)]
        for page, number in enumerate(np.frombuffer(row, np.int64).tolist()):
            text = tuple(tokens[: (page + 1) * page_tokens])
            assert numbers.setdefault(number, text) == text
            names.setdefault(text, number)


def test_a_prompt_that_is_none_is_refused_and_changes_nothing() -> None:
    ideal = new_ideal()
    with pytest.raises(ValueError, match=r"every block has a length|argument 2"):
        ideal.serve([1, 2], [8], 8, 4)


@pytest.fixture(scope="module")
def conversations() -> Path:
    path = TRACES / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the Mooncake conversation trace is not at {path}: KVMOVER_TRACES names its folder")
    return path


@pytest.fixture(scope="module")
def unlimited(conversations: Path, used_core: str) -> Report:
    return replay(read_trace(conversations), ReplayConfig(64))


def test_the_conversation_trace_comes_to_its_ideal_at_page_64(conversations: Path, unlimited: Report) -> None:
    """Counted here from the file alone: known tokens of each block, in whole pages."""
    known, hits, prompts = dict[int, int](), 0, 0
    for line in conversations.read_text().splitlines():
        entry = json.loads(line)
        length, reused = entry["input_length"], 0
        for at, block in enumerate(entry["hash_ids"]):
            wanted = min(512, length - at * 512)
            reused += min(wanted, known.get(block, 0))
            if known.get(block, 0) < wanted:
                break
        hits += min(reused, length - 1) // 64 * 64
        prompts += length
        for at, block in enumerate(entry["hash_ids"]):
            known[block] = max(known.get(block, 0), min(512, length - at * 512))
    assert round(hits / prompts, 4) == 0.3736
    assert (unlimited.totals.prompt_tokens, unlimited.totals.device_tokens) == (prompts, hits)


@pytest.mark.parametrize(("capacity_tokens", "vllm"), [(3_000_000, 0.1420), (10_000_000, 0.2939)])
def test_at_equal_capacity_the_conversation_trace_hits_as_often_as_in_vllm(
    conversations: Path, capacity_tokens: int, vllm: float
) -> None:
    """vLLM 0.33 evicts single pages: 0.1421 and 0.2940. Trees that evict whole nodes: 0.1399 and 0.2917."""
    assert replay(read_trace(conversations), ReplayConfig(64, capacity_tokens)).totals.hit_rate > vllm


@pytest.mark.parametrize(
    ("config", "hit_rate", "starved_tokens"),
    [
        (ReplayConfig(64, 3_000_000, 10_000_000, writes=WriteThrough()), 0.2940, 0),
        (ReplayConfig(64, 3_000_000, 10_000_000, 40_000_000, writes=WriteThrough()), 0.3684, 0),
        (ReplayConfig(64, 3_000_000, 2_000_000, 40_000_000, writes=WriteThrough()), 0.2709, 7_100_000),
        (ReplayConfig(64, 3_000_000, 10_000_000), 0.3193, 0),
        (ReplayConfig(64, 3_000_000, 10_000_000, 40_000_000), 0.3699, 0),
        (ReplayConfig(64, 3_000_000, 2_000_000, 40_000_000), 0.3699, 0),
        (ReplayConfig(64, 3_000_000, policy=HAZARD), 0.1779, 0),
        (ReplayConfig(64, 3_000_000, policy=FIFO), 0.1420, 0),
        (ReplayConfig(64, 10_000_000, policy=FIFO), 0.2934, 0),
        (ReplayConfig(64, 30_000_000, policy=HAZARD), 0.3660, 0),
        (ReplayConfig(64, 30_000_000), 0.3660, 0),
    ],
    ids=lambda value: f"{value.device_tokens}-{value.host_tokens}" if isinstance(value, ReplayConfig) else str(value),
)
def test_the_conversation_trace_hits_as_often_as_the_measurements_say(
    conversations: Path, config: ReplayConfig, hit_rate: float, starved_tokens: int
) -> None:
    """docs/measurements.md and docs/tutorial.md quote these numbers."""
    totals = replay(read_trace(conversations), config).totals
    assert round(totals.hit_rate, 4) == hit_rate
    assert round(totals.lost.get(Loss.HOST_CAPACITY, 0), -5) == starved_tokens
