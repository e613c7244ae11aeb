"""An engine of transformers computes what the model alone computes, wherever the rows of its prompt come from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import load, make

from kvmover.config import ConfigError
from kvmover.engines.common import EngineUnsupported, NoFreePages, Remote
from kvmover.engines.transformers import TransformersEngine
from kvmover.errors import PlanError

GREEDY = {"max_new_tokens": 12, "do_sample": False}
PROMPT = torch.randint(0, 256, (210,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GQA: two KV heads for four."""
    return make(tmp_path_factory.mktemp("gqa"))


@pytest.fixture
def open_engine() -> Iterator[Any]:
    """Engines that end with the test."""
    with ExitStack() as opened:
        yield lambda model, **options: opened.enter_context(
            TransformersEngine(model if hasattr(model, "generate") else load(model), options)
        )


def alone(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)


def at(engine: TransformersEngine, name: str) -> Remote:
    return Remote("", name, engine.rank.host, engine.rank.port)


def rows_of(engine: TransformersEngine, cache: Any, tokens: int) -> torch.Tensor:
    """[layer, kv, token, head, dim] of a lent cache."""
    layers = range(engine.rank.pool.spec.component.layers)
    pages = torch.tensor(cache.table.pages)
    planes = [[engine.rank.pool.plane(layer, kv)[pages].flatten(0, 1)[:tokens] for kv in (0, 1)] for layer in layers]
    return torch.stack([torch.stack(each) for each in planes])


@pytest.mark.parametrize(
    ("family", "own"),
    [("llama", {}), ("qwen3", {}), ("llama", {"num_key_value_heads": 4}), ("llama", {"num_key_value_heads": 1})],
    ids=["gqa", "qwen3", "mha", "mqa"],
)
@pytest.mark.parametrize("pages", [(16, 64), (48, 10)], ids=["16-64", "48-10"])
def test_one_engine_prefills_and_another_decodes_as_one_process_would(
    family: str, own: dict[str, int], pages: tuple[int, int], tmp_path: Path, open_engine: Any
) -> None:
    made = make(tmp_path / "model", family, **own)
    one, other = (open_engine(made, page_tokens=each, chunk_tokens=50, tokens=1024) for each in pages)
    first = one.serve(PROMPT, "r", top_logprobs=2, do_sample=False)
    wanted = alone(load(made), PROMPT)
    assert first.token == first.top[0][0] == wanted[0, len(PROMPT)]
    assert first.logprob == first.top[0][1] > first.top[1][1]
    assert torch.equal(other.generate(PROMPT, at(one, "r"), **GREEDY), wanted)
    assert len(one.rank.pages) == -(-1024 // pages[0])
    assert len(other.rank.pages) == -(-1024 // pages[1])


def test_rows_that_land_are_the_bytes_that_were_computed_and_neighbours_stay(folder: Path, open_engine: Any) -> None:
    one, other = open_engine(folder), open_engine(folder, page_tokens=40)
    for tensor in other.rank.pool.tensors:
        tensor.fill_(0xA5)
    one.serve(PROMPT, "r", do_sample=False)
    with other.cache(PROMPT, at(one, "r")) as cache:
        assert (cache.reason, cache.get_seq_length()) == ("", len(PROMPT) - 1)
        landed, mine = rows_of(other, cache, len(PROMPT)), set(cache.table.pages)
        found_by, ids = load(folder), torch.tensor([PROMPT])
        found = found_by(ids, use_cache=True).past_key_values
        whole = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in found.layers])
        assert torch.equal(landed, whole.transpose(2, 3))
        others = [page for page in range(other.rank.pool.plane(0, 0).shape[0]) if page not in mine]
        untouched = other.rank.pool.plane(1, 1).view(torch.uint8)[others]
        assert (untouched == 0xA5).all()


def test_a_prefix_comes_from_the_page_store_and_the_rest_from_an_engine(
    folder: Path, tmp_path: Path, open_engine: Any
) -> None:
    made = {"root": str(tmp_path), "page_tokens": 16}
    writer, reader, giver = open_engine(folder, **made), open_engine(folder, **made), open_engine(folder)
    wanted = alone(load(folder), PROMPT)
    assert torch.equal(writer.generate(PROMPT[:100], **GREEDY)[0, :100], torch.tensor(PROMPT[:100]))
    giver.serve(PROMPT, "r", do_sample=False)
    with reader.cache(PROMPT, at(giver, "r")) as cache:
        assert (cache.stored, cache.reason, cache.get_seq_length()) == (6, "", len(PROMPT) - 1)
        stored = rows_of(reader, cache, 96)
    with writer.cache(PROMPT[:100]) as cache:
        assert cache.stored == 6
        assert torch.equal(rows_of(writer, cache, 96), stored)
    assert torch.equal(reader.generate(PROMPT, **GREEDY), wanted)
    with writer.cache(PROMPT) as cache:
        assert cache.stored == 13
    assert torch.equal(writer.generate(PROMPT, **GREEDY), wanted)


@pytest.mark.parametrize(
    ("asked", "own", "words"),
    [
        ([*PROMPT[:-1], 511], {}, "were asked for"),
        (PROMPT[:-5], {}, "were asked for"),
        (PROMPT, {"seed": 8}, "differ in weights"),
        (PROMPT, {"num_hidden_layers": 2}, "attention.layers"),
    ],
    ids=["another token", "fewer tokens", "other weights", "fewer layers"],
)
def test_kv_of_another_prompt_or_model_is_refused_with_a_sentence_and_computed(
    asked: list[int], own: dict[str, int], words: str, folder: Path, tmp_path: Path, open_engine: Any
) -> None:
    made = make(tmp_path / "other", **own) if own else folder
    one, other = open_engine(folder), open_engine(made)
    one.serve(PROMPT, "r", do_sample=False)
    with other.cache(asked, at(one, "r")) as cache:
        assert words in cache.reason
        assert cache.get_seq_length() == 0
    assert torch.equal(other.generate(asked, at(one, "r"), **GREEDY), alone(load(made), asked))


def test_weights_that_were_changed_in_memory_are_not_those_of_their_files(folder: Path, open_engine: Any) -> None:
    """As a LoRA adapter is merged: by the file's name nobody would know."""
    model = load(folder)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.add_(0.5)
    with pytest.raises(ConfigError, match=r"v_proj.weight in memory has other values"):
        open_engine(model)
    assert open_engine(model, weights="merged").rank.weights.started == "merged"


def test_weights_that_change_later_share_kv_with_nobody_until_they_have_a_name(
    folder: Path, tmp_path: Path, open_engine: Any
) -> None:
    models = [load(folder), load(folder)]
    one, other = (open_engine(model, root=str(tmp_path)) for model in models)
    one.generate(PROMPT, **GREEDY)
    for model in models:
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.add_(0.5)
    wanted = alone(models[0], PROMPT)
    one.serve(PROMPT, "r", do_sample=False)
    with other.cache(PROMPT, at(one, "r")) as cache:
        assert cache.stored == 0
        assert "differ in weights" in cache.reason
    assert torch.equal(other.generate(PROMPT, **GREEDY), wanted)
    one.updated("step 2")
    other.updated("step 2")
    one.serve(PROMPT, "s", do_sample=False)
    with other.cache(PROMPT, at(one, "s")) as cache:
        assert (cache.reason, cache.get_seq_length()) == ("", len(PROMPT) - 1)
    assert torch.equal(other.generate(PROMPT, **GREEDY), wanted)


def test_an_adapter_without_its_folder_is_unknown_and_its_kv_is_not_given(folder: Path, open_engine: Any) -> None:
    model = load(folder)
    one, other = open_engine(model), open_engine(folder)
    with pytest.raises(PlanError, match="the model has none"):
        one.serve(PROMPT, "r", adapter=str(folder))
    model.peft_config = {"default": SimpleNamespace()}  # as peft leaves it
    one.serve(PROMPT, "s", do_sample=False)
    with other.cache(PROMPT, at(one, "s")) as cache:
        assert "adapter without a folder" in cache.reason
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("half", [(), ("half",)], ids=["before the ask", "while it computes"])
def test_a_prefill_that_dies_leaves_a_decode_that_computes(
    half: tuple[str, ...], folder: Path, open_engine: Any
) -> None:
    prompt = list(range(200))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, Path(__file__).parent / "serving_process.py", folder, str(len(prompt)), *half]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    giver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)
    assert giver.stdout
    port = int(giver.stdout.readline())
    other = open_engine(folder, deadline_s=8, page_tokens=32)
    if half:
        assert giver.stdout.readline() == "half\n"
    giver.kill()
    giver.wait()
    with other.cache(prompt, Remote("", "r", "127.0.0.1", port)) as cache:
        assert cache.reason
        assert cache.get_seq_length() == 0
    assert torch.equal(other.generate(prompt, **GREEDY), alone(load(folder), prompt))


def test_a_prefill_without_room_refuses_at_once_and_the_decode_computes(folder: Path, open_engine: Any) -> None:
    one, other = open_engine(folder, tokens=64), open_engine(folder)
    with pytest.raises(NoFreePages, match="14 pages of 4: 4 are free"):
        one.serve(PROMPT, "r")
    with other.cache(PROMPT, at(one, "r")) as cache:
        assert "14 pages of 4" in cache.reason
    assert len(one.rank.pages) == 4


def test_pages_of_an_offer_are_not_free_before_an_engine_has_them(folder: Path, open_engine: Any) -> None:
    one, other = open_engine(folder, tokens=256), open_engine(folder)
    one.serve(PROMPT, "r", do_sample=False)
    with pytest.raises(NoFreePages, match="transfers have 14"), one.cache(PROMPT):
        pass
    other.generate(PROMPT, at(one, "r"), **GREEDY)
    assert len(one.rank.pages) == 16


def test_several_sequences_and_caches_with_windows_are_refused(folder: Path, tmp_path: Path, open_engine: Any) -> None:
    one = open_engine(folder)
    with pytest.raises(EngineUnsupported, match="2 sequences in a cache of one"):
        one.generate(PROMPT, num_beams=2, max_new_tokens=4)
    windows = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    with pytest.raises(EngineUnsupported, match="windows, states or other layers"):
        open_engine(make(tmp_path / "windows", "gemma3_text", query_pre_attn_scalar=16, **windows))


def test_a_key_that_is_no_option_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="page_tokns"):
        TransformersEngine(load(folder), {"page_tokns": 16})
