"""A trained model in the demo, sharded and moved, says the same: to the last bit where sums keep their order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmover.errors import LayoutError
from kvmover.tools.demo import llama_checkpoint
from kvmover.tools.demo.model import Alone, ContiguousCache, ModelConfig, ModelShard, PagedCache, Transformer
from kvmover.tools.demo.perplexity import Perplexity
from kvmover.tools.demo.scenarios import SMOLLM2
from kvmover.tools.demo.smollm2 import PACKAGES, missing

#: SmolLM2's architecture in small: 9 query heads over 3 KV heads.
TINY = replace(SMOLLM2, name="tiny", layers=2, hidden=72, head_dim=8, value_dim=8, vocab=64, mlp=96)
TOKENS = random.Random(5).choices(range(64), k=90)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny(tmp_path: Path) -> ModelConfig:
    """A checkpoint of drawn weights, as transformers would write it."""
    drawn, hidden, wide = np.random.default_rng(1), TINY.hidden, TINY.kv_heads * TINY.head_dim
    shapes = {"query": [hidden, hidden], "out": [hidden, hidden], "gate": [96, hidden], "up": [96, hidden]}
    shapes |= {"down": [hidden, 96], "rows": [wide, hidden], "embedding": [64, hidden], "words": [64, hidden]}
    tensors = {
        name.format(layer=layer): drawn.standard_normal(shapes.get(kind, [hidden]), np.float32) / math.sqrt(hidden)
        for layer in range(TINY.layers)
        for kind, names in llama_checkpoint.LLAMA_NAMES.items()
        for name in names
    }
    llama_checkpoint.write(
        tmp_path / "model.safetensors", {name: each.astype(np.float32) for name, each in tensors.items()}
    )
    return replace(TINY, checkpoint=str(tmp_path / "model.safetensors"))


def alone(config: ModelConfig) -> Transformer:
    return Transformer(config, ModelShard.of_rank(config, 1, 1, 0, 0), Alone())


def paged(config: ModelConfig, page_tokens: int, axes: str) -> PagedCache:
    """A pool in this axis order, poisoned, and pages in no order."""
    pages = -(-len(TOKENS) // page_tokens)
    sizes = {"l": config.layers, "p": pages + 2, "t": page_tokens, "k": 2, "h": config.kv_heads, "d": config.head_dim}
    pool = torch.full([sizes[axis] for axis in axes], torch.nan)
    view = pool.permute([axes.index(axis) for axis in "lptkhd"])
    return PagedCache(dict(enumerate(view)), random.Random(2).sample(range(pages + 2), pages), page_tokens)


def test_surprises_are_those_of_the_definition(tiny: ModelConfig) -> None:
    """The probability of each token, computed for one prompt after another without a cache of before."""
    model = alone(tiny)
    scored = model.score(TOKENS[:12], 0, ContiguousCache())
    for place, surprise in enumerate(scored):
        hidden = model._hidden(TOKENS[: place + 1], 0, ContiguousCache())[-1]
        assert surprise == pytest.approx(
            float(-torch.log_softmax(model._logits(hidden), -1)[TOKENS[place + 1]]), abs=1e-5
        )


@pytest.mark.parametrize(("page_tokens", "axes"), [(16, "lkpthd"), (7, "lkphtd"), (64, "phlktd")])
def test_a_text_scored_from_rows_in_other_pages_is_equal_to_the_last_bit(
    tiny: ModelConfig, page_tokens: int, axes: str
) -> None:
    model, source, target = alone(tiny), paged(tiny, 16, "lkpthd"), paged(tiny, page_tokens, axes)
    model.score(TOKENS[:46], 0, source)
    for layer in range(tiny.layers):
        target.write(layer, range(45), source.read(layer, 45))
    assert model.score(TOKENS, 45, target) == model.score(TOKENS, 45, source)


def test_one_wrong_element_of_a_row_is_another_perplexity(tiny: ModelConfig) -> None:
    model, cache = alone(tiny), ContiguousCache()
    model.score(TOKENS[:46], 0, cache)
    right = model.score(TOKENS, 45, cache)
    cache.rows[0][0, 3, 1, 2] += 0.5
    found = Perplexity.of("x", "x", True, right, model.score(TOKENS, 45, cache))
    assert found.differ > 0
    assert not found.passed


def test_float64_takes_away_what_another_order_of_sums_leaves(tiny: ModelConfig) -> None:
    """The cause of the difference between two sizes of TP: sums over another split, rounded in float32."""
    apart = dict[str, float]()
    for dtype in ("float32", "float64"):
        config = replace(tiny, dtype=dtype)
        whole = alone(config)
        shards = [Transformer(config, ModelShard.of_rank(config, 3, 1, rank, 0), Alone()) for rank in range(3)]
        inner = torch.randn(40, tiny.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        inner = inner.to(getattr(torch, dtype))
        parts = [shard._attention(0, inner, 0, ContiguousCache()) for shard in shards]
        due = whole._attention(0, inner, 0, ContiguousCache())
        apart[dtype] = float((parts[0] + parts[1] + parts[2] - due).abs().max())
    assert 0 < apart["float32"] < 1e-5
    assert apart["float64"] < 1e-6 * apart["float32"]


def test_a_text_in_place_and_moved_is_told_in_words() -> None:
    same = Perplexity.of("moved", "moved", True, [1.0, 2.0], [1.0, 2.0])
    assert same.sentence() == f"perplexity of 2 tokens, moved: {math.exp(1.5)!r}, equal to the last bit"
    other = Perplexity.of("fp8", "to fp8", False, [1.0, 2.0], [1.0, 2.5])
    assert other.passed
    assert other.sentence().endswith("1 tokens differ, by 0.5 nats at most")


def test_tp2_of_nine_query_heads_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not split over TP2"):
        ModelShard.of_rank(SMOLLM2, 2, 1, 0, 0)


needs_weights = pytest.mark.skipif(bool(missing()), reason=f"`make demo MODEL=smollm2` installs {', '.join(PACKAGES)}")


@needs_weights
def test_the_model_of_the_package_has_the_sizes_of_the_scenario_and_answers_in_english(tmp_path: Path) -> None:
    import json

    from kvmover.tools.demo.english import QUESTIONS
    from kvmover.tools.demo.smollm2 import Tongue, unpack

    told = json.loads((unpack(tmp_path) / "config.json").read_text())
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = [SMOLLM2.layers, SMOLLM2.hidden, SMOLLM2.query_heads, SMOLLM2.kv_heads, SMOLLM2.head_dim, SMOLLM2.vocab]
    assert [told[name] for name in names] == sizes
    assert (told["intermediate_size"], told["rope_theta"], told["rms_norm_eps"]) == (1536, 100000.0, 1e-5)
    tongue = Tongue.of(tmp_path)
    assert tongue.text(tongue.tokens("A café in 1999,\n twice")) == "A café in 1999,\n twice"
    model = alone(replace(SMOLLM2, checkpoint=str(tmp_path / "model.safetensors")))
    answer = model.generate(tongue.asked(QUESTIONS[0].text), QUESTIONS[0].tokens, ContiguousCache())
    assert tongue.text(answer) == "The capital of France is Paris."
    assert answer[-1] == tongue.end


@needs_weights
@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_whole_scenario_is_that_of_one_process() -> None:
    from kvmover.tools.demo.run import DemoOptions, run

    report = run(DemoOptions(scenarios=("smollm2",)), lambda what, requests: None)
    assert report.passed, report.sentence()
    requests, (moved, other, fp8) = report.requests, report.scenarios[0].perplexities
    assert [request.text == request.expected_text for request in requests] == [True] * 3
    assert moved.exact
    assert moved.differ == 0
    assert other.differ > 0
    assert abs(other.moved - other.in_place) < 1e-3
    assert abs(fp8.moved - fp8.in_place) > abs(other.moved - other.in_place)
