"""The content of SGLang's own requests: equal for what two halves mean by one prompt, and for nothing else."""

from __future__ import annotations

from array import array
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import context  # what SGLang imports is stood in for there

from kvmover.cache.prefix import PrefixTree
from kvmover.engines.common import content_of
from kvmover.engines.sglang import engine_pd, sglang_plugin
from kvmover.engines.sglang.radix_keys import RadixKeys
from kvmover.engines.sglang.sglang_content import LoadedAdapters, RequestReader
from kvmover.transfer import Content
from tests.safetensors_files import tiny, write_file

batches: Any = import_module("sglang.srt.managers.schedule_batch")
params: Any = import_module("sglang.srt.sampling.sampling_params")
embeddings: Any = import_module("sglang.srt.managers.embed_types")
loras: Any = import_module("sglang.srt.lora.lora_registry")

seed_of: Any = import_module("sglang.srt.mem_cache.utils").storage_namespace_seed

IDS = array("q", range(300))


def req(ids: array[int] = IDS, images: list[Any] | None = None, **more: Any) -> Any:
    made = batches.Req("r", "", ids, params.SamplingParams(max_new_tokens=8), bootstrap_room=7, **more)
    if images is not None:
        made.multimodal_inputs = batches.MultimodalInputs(images)
    return made


def image(seed: int, at: int = 10, grid: tuple[int, ...] = (1, 4, 4)) -> Any:
    pixels = torch.rand(16, 8, generator=torch.Generator().manual_seed(seed))
    item = batches.MultimodalDataItem(modality=batches.Modality.IMAGE, feature=pixels, offsets=[(at, at + 3)])
    item.image_grid_thw = torch.tensor([grid])
    item.set_pad_value()
    return item


def padded(made: Any) -> Any:
    """As SGLang's scheduler writes hashes of images over the ids."""
    pad = batches.MultimodalProcessorOutput.build_padded_input_ids
    made.origin_input_ids = array("q", pad(made.origin_input_ids, made.multimodal_inputs.mm_items))
    return made


def adapter(folder: Path, seed: int) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    write_file(folder / "adapter_model.safetensors", tiny(seed=seed))
    return str(folder)


def content(made: Any, adapters: LoadedAdapters | None = None) -> Content:
    return RequestReader(adapters or LoadedAdapters()).content(made)


def test_a_request_of_tokens_alone_has_the_content_that_any_engine_gives_it() -> None:
    assert content(req()) == content_of(list(range(300)))


def test_an_adapter_goes_by_its_bytes_and_not_by_sglangs_id_or_name(tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", 1), adapter(tmp_path / "other", 2)
    same = adapter(tmp_path / "elsewhere", 1)
    here, there = LoadedAdapters(), LoadedAdapters()
    ids = [loras.LoRARef(lora_name="A", lora_path=path).lora_id for path in (one, same, other)]
    here.load(ids[0], one)
    there.load(ids[1], same)
    there.load(ids[2], other)
    meant = content(req(lora_id=ids[0]), here)
    assert meant.digest
    assert content(req(lora_id=ids[1]), there) == meant  # SGLang has both ids in the extra key, too
    assert len({meant.digest, content(req(lora_id=ids[2]), there).digest, content(req()).digest}) == 3


def test_an_adapter_that_changes_on_disk_after_it_was_loaded_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    folder, adapters = adapter(tmp_path / "one", 1), LoadedAdapters()
    adapters.load("id", folder)
    before = content(req(lora_id="id"), adapters)
    write_file(tmp_path / "one" / "adapter_model.safetensors", tiny(seed=2))
    assert content(req(lora_id="id"), adapters) == before


def test_an_adapter_that_came_without_files_is_unknown(tmp_path: Path) -> None:
    adapters = LoadedAdapters(engine_pd._folder_of)
    adapters.load("gone", str(tmp_path / "gone"))
    for lora_id in ("gone", "from tensors"):
        unknown = content(req(lora_id=lora_id), adapters)
        assert (unknown.tokens, unknown.digest) == (300, b"")
        assert "adapter" in unknown.unknown


@pytest.mark.parametrize("lora_id", [None, "0f" * 16])
def test_salts_and_extra_keys_keep_prompts_apart_whatever_sglang_adds_to_them(lora_id: str | None) -> None:
    adapters = LoadedAdapters()
    adapters._parts["0f" * 16] = adapters.parts(None)
    told = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("b", "a"), ("ab", "")]
    found = [content(req(lora_id=lora_id, cache_salt=salt, extra_key=key), adapters).digest for salt, key in told]
    assert len(set(found)) == len(told)
    made = req(lora_id=lora_id, extra_key="a", cache_salt="b")
    made.extra_key += "|elastic_ep_size=8"  # as the scheduler of an elastic fleet does, however many it is
    assert content(made, adapters) == content(req(extra_key="a", cache_salt="b"))


def test_a_salt_that_is_no_text_is_unknown_and_ends_no_scheduler() -> None:
    assert content(req(cache_salt="\ud800")) == Content(300, unknown="the salt is no Unicode text")
    assert content(req(extra_key="\ud800")).digest


def test_an_image_goes_by_its_pixels_its_grid_and_its_place() -> None:
    meant = content(padded(req(images=[image(1)])))
    assert meant.digest
    assert content(padded(req(images=[image(1)]))) == meant
    others = [[image(2)], [image(1, at=11)], [image(1, grid=(1, 2, 8))], [image(1), image(1, at=20)]]
    found = [content(padded(req(images=each))).digest for each in others]
    assert len({meant.digest, content(req()).digest, *found}) == 6
    assert content(padded(req(array("q", [9, *IDS[1:]]), images=[image(1)]))).digest != meant.digest


def test_an_image_whose_hash_is_drawn_by_lot_is_unknown() -> None:
    reader = RequestReader(LoadedAdapters(), "SGLANG_MM_SKIP_COMPUTE_HASH is on: images have no hash")
    assert reader.content(padded(req(images=[image(1)]))) == Content(300, unknown=reader.unhashed)
    assert reader.content(req()).digest


def test_embeddings_go_by_their_numbers() -> None:
    rows = torch.rand(300, 4).tolist()
    at = ((0.1, 3), (0.1, 4), (0.2, 3))
    placed = [embeddings.PositionalEmbeds(torch.full((1, 4), value), [where]) for value, where in at]
    made = [
        req(),
        req(input_embeds=rows),
        req(input_embeds=[*rows[:-1], rows[0]]),
        *(req(positional_embed_overrides=each) for each in placed),
        req(token_type_ids=[0] * 300),
    ]
    assert len({content(each).digest for each in made}) == len(made)
    assert content(req(input_embeds=rows)) == content(req(input_embeds=rows))
    proxied = SimpleNamespace(embeds=object(), positions=[3])
    assert "in another process" in content(req(positional_embed_overrides=proxied)).unknown


@pytest.mark.parametrize("named", [{}, {"cache_salt": "s"}, {"extra_key": "k"}])
def test_a_request_that_prefill_computes_again_after_a_retraction_is_what_sglang_asks_it_for(named: Any) -> None:
    """Its prompt and what was said since, but for the last token."""
    retracted = req(**named)
    retracted.output_ids = array("q", [5, 6, 7])
    assert content(retracted) == content(req(**named))  # not yet
    retracted.pd_rebootstrap_forced_output_id = retracted.output_ids.pop()
    retracted.pd_rebootstrap_in_progress = True
    asked = retracted.build_rebootstrap_payload()
    again = req(array("q", asked["input_ids"]), extra_key=asked["extra_key"], cache_salt=asked["cache_salt"])
    assert content(retracted) == content(again)
    assert content(retracted).tokens == 302


def test_what_sglang_would_compute_again_without_its_adapter_is_another_prompt(tmp_path: Path) -> None:
    """Its request to the prefill names no adapter."""
    adapters = LoadedAdapters()
    adapters.load("0f" * 16, adapter(tmp_path / "one", 1))
    retracted = req(lora_id="0f" * 16)
    retracted.pd_rebootstrap_in_progress = True
    asked = retracted.build_rebootstrap_payload()
    again = req(array("q", asked["input_ids"]), extra_key=asked["extra_key"])
    assert content(retracted, adapters).digest != content(again, adapters).digest


def test_kv_of_an_adapter_is_not_found_once_its_files_are_others(tmp_path: Path) -> None:
    """In a tree or a store that outlives the server: they go by the extra key, in which SGLang has the adapter's id."""
    own = loras.LoRARef.__dict__["deterministic_id"].__func__
    own = getattr(own, "__wrapped__", own)
    sglang_plugin.register()
    engine_pd._hooks.HookRegistry.apply_hooks()
    folder, ids = adapter(tmp_path / "one", 1), list[str]()
    for seed in (1, 2, 1):
        write_file(tmp_path / "one" / "adapter_model.safetensors", tiny(seed=seed))
        ids.append(loras.LoRARef.deterministic_id("A", folder))
    assert ids[0] == ids[2] != ids[1]
    keys = RadixKeys(PrefixTree(16), {})
    tree = [keys.of_request(req(lora_id=each), IDS).namespace for each in ids]
    assert tree[0] == tree[2] != tree[1]
    seeds = [seed_of(req(lora_id=each).extra_key, None) for each in ids]
    assert seeds[0] == seeds[2] != seeds[1]
    assert loras.LoRARef.deterministic_id("A", "someone/adapter") == own("A", "someone/adapter")


def test_adapters_are_read_as_sglang_loads_them(tmp_path: Path) -> None:
    sglang_plugin.register()
    engine_pd._hooks.HookRegistry.apply_hooks()
    assert context is not None
    name = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter"
    engine_pd._wrap(name, engine_pd._reading)
    manager = object.__new__(import_module("sglang.srt.lora.lora_manager").LoRAManager)
    loaded = loras.LoRARef(lora_name="A", lora_path=adapter(tmp_path / "one", 1), pinned=False)
    with pytest.raises(AttributeError):
        manager.load_lora_adapter(loaded)  # it has no model
    assert engine_pd._adapters.parts(loaded.lora_id).adapter
