"""The content of a prompt: equal for equal prompts in whatever form they come, and for no two that differ."""

from __future__ import annotations

import shutil
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmover.engines.common import PromptHasher, PromptInput, PromptParts, adapter_parts, content_of, digest_of_tensors
from kvmover.transfer import Content
from tests.safetensors_files import tiny, write_file

TOKENS = [(7919 * each) % 151_936 for each in range(300)]
PARTS = PromptParts(b"adapter", "salt", (PromptInput(3, 5, b"image"), PromptInput(20, 4, b"another")))


@pytest.mark.parametrize("form", [tuple, np.array, lambda ids: np.array(ids, np.int32), lambda ids: array("i", ids)])
def test_the_form_of_token_ids_makes_no_difference(form) -> None:
    assert content_of(form(TOKENS), PARTS) == content_of(TOKENS, PARTS)


@pytest.mark.parametrize(
    "parts",
    [
        PromptParts(),
        PromptParts(b"adapter", "salt", PARTS.inputs[:1]),
        PromptParts(b"adapter", "salt", PARTS.inputs[::-1]),
        PromptParts(b"adapter", "salt", (PromptInput(3, 5, b"image"), PromptInput(20, 4, b"other"))),
        PromptParts(b"adapter", "salt", (PromptInput(4, 5, b"image"), PARTS.inputs[1])),
        PromptParts(b"adapter", "", PARTS.inputs),
        PromptParts(b"", "salt", PARTS.inputs),
        PromptParts(b"adapters", "alt", PARTS.inputs),
    ],
)
def test_whatever_a_prompts_kv_depends_on_is_in_its_digest(parts: PromptParts) -> None:
    assert content_of(TOKENS, parts).digest != content_of(TOKENS, PARTS).digest


def test_one_token_more_less_or_other_is_another_prompt() -> None:
    others = [TOKENS[:-1], [*TOKENS, 0], [1, *TOKENS[1:]], TOKENS[1:], []]
    assert len({content_of(ids).digest for ids in [TOKENS, *others]}) == 6


def test_a_prompt_that_grows_has_the_content_of_each_of_its_beginnings() -> None:
    growing = PromptHasher(PARTS)
    for tokens in (0, 1, 64, 64, 65, 300):
        assert growing.content(TOKENS, tokens) == content_of(TOKENS[:tokens], PARTS)


def test_a_beginning_has_the_images_that_begin_in_it() -> None:
    assert PARTS.before(20).inputs == PARTS.inputs[:1]
    assert PARTS.before(21) == PARTS


def test_what_has_no_id_by_content_is_unknown_and_says_why() -> None:
    assert content_of(TOKENS, PromptParts(unknown="images in shared memory")) == Content(
        300, unknown="images in shared memory"
    )
    assert content_of([1, -1]).digest == b""
    assert "32 bits and no sign" in content_of([1, -1]).unknown


def write_adapter(folder: Path, seed: int) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    write_file(folder / "adapter_model.safetensors", tiny(seed))


def test_an_adapter_is_the_same_at_another_path_and_none_where_its_files_are_gone(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    write_adapter(tmp_path / "b", 2)
    a, elsewhere, b, gone = (adapter_parts(str(tmp_path / name), PARTS) for name in ("a", "elsewhere", "b", "gone"))
    assert a == elsewhere
    assert content_of(TOKENS, a) == content_of(TOKENS, elsewhere) != content_of(TOKENS, b)
    assert "gone" in gone.unknown
    assert content_of(TOKENS, gone).digest == b""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_an_image_is_the_bytes_of_its_tensors(dtype: torch.dtype) -> None:
    pixels = torch.arange(24).reshape(2, 3, 4).to(dtype)
    grid = torch.tensor([[1, 2, 2]])
    named = [("pixel_values", pixels), ("image_grid_thw", grid)]
    assert digest_of_tensors(named) == digest_of_tensors(reversed(named))
    assert digest_of_tensors([("pixel_values", pixels.mT.contiguous().mT), named[1]]) == digest_of_tensors(named)
    other = pixels.clone()
    other[1, 2, 3] = 1
    changed = [[("pixel_values", other), named[1]], [("pixel_values", pixels.reshape(3, 2, 4)), named[1]], named[:1]]
    changed.append([("pixels", pixels), named[1]])
    assert len({digest_of_tensors(each) for each in [named, *changed]}) == 5
