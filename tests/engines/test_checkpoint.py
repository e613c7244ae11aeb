"""A digest of weights: equal for every path and every split into files, another for another model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmover.engines.common.checkpoint import (
    MOST_HEADER_BYTES,
    MOST_READS,
    SAMPLED_TENSORS,
    UnknownWeights,
    digest_of_adapter,
    digest_of_checkpoint,
)
from tests.safetensors_files import Tensors, tiny, write_checkpoint, write_file

EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
MATRIX = "model.layers.0.self_attn.q_proj.weight"


def digest(folder: Path) -> str:
    return digest_of_checkpoint(folder).digest


def test_every_split_into_files_and_every_path_gives_one_digest(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / f"in-{files}", tiny(), files) for files in (1, 2, 4)]
    folders.append(write_checkpoint(tmp_path / "elsewhere" / "deeper", tiny()))
    backwards = dict(reversed(tiny().items()))
    folders.append(write_checkpoint(tmp_path / "backwards", backwards))
    loose = tmp_path / "without an index"
    loose.mkdir()
    names = sorted(tiny())
    for number, part in enumerate((names[:2], names[2:])):
        write_file(loose / f"part-{number}.safetensors", {name: tiny()[name] for name in part}, {"written": "by hand"})
    assert len({digest(folder) for folder in [*folders, loose]}) == 1
    assert digest_of_checkpoint(loose).tensors == len(tiny())


@pytest.mark.parametrize("name", [EMBEDDING, NORM, MATRIX, "lm_head.weight"])
def test_a_changed_tensor_is_another_digest(name: str, tmp_path: Path) -> None:
    changed = tiny() | {name: tiny(seed=2)[name]}
    assert digest(write_checkpoint(tmp_path / "one", tiny())) != digest(write_checkpoint(tmp_path / "two", changed))


def test_one_changed_value_of_a_tensor_that_is_read_whole_is_another_digest(tmp_path: Path) -> None:
    dtype, shape, data = tiny()[NORM]
    changed = tiny() | {NORM: (dtype, shape, data[:-4] + b"\0\0\0\0")}
    assert digest(write_checkpoint(tmp_path / "one", tiny())) != digest(write_checkpoint(tmp_path / "two", changed))


@pytest.mark.parametrize(
    "change",
    [
        lambda of: {f"{name}s": tensor for name, tensor in of.items()},
        lambda of: {name: ("I32", shape, data) for name, (_, shape, data) in of.items()},
        lambda of: {name: (dtype, [1, *shape], data) for name, (dtype, shape, data) in of.items()},
        lambda of: {name: tensor for name, tensor in of.items() if name != MATRIX},
    ],
    ids=["names", "dtypes", "shapes", "a tensor less"],
)
def test_other_names_dtypes_and_shapes_of_the_same_bytes_are_another_digest(
    change: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    one, two = write_checkpoint(tmp_path / "one", tiny()), write_checkpoint(tmp_path / "two", change(tiny()))
    assert digest(one) != digest(two)


def test_a_file_that_is_replaced_in_place_is_looked_at_again(tmp_path: Path) -> None:
    before = digest(write_checkpoint(tmp_path, tiny()))
    (tmp_path / "model.safetensors").unlink()
    assert digest(write_checkpoint(tmp_path, tiny(seed=2))) != before
    (tmp_path / "model.safetensors").unlink()
    assert digest(write_checkpoint(tmp_path, tiny())) == before


class Reads:
    """Counts reads of files, by size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        true = os.pread

        def pread(file: int, nbytes: int, position: int) -> bytes:
            self.sizes.append(nbytes)
            return true(file, nbytes, position)

        monkeypatch.setattr("kvmover.engines.common.checkpoint.os.pread", pread)


@pytest.mark.parametrize("files", [1, 163])
def test_ten_thousand_tensors_take_no_more_reads_than_are_allowed(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which most are sampled: norms and embeddings, before all others."""
    experts = {f"model.layers.{n // 100}.mlp.experts.{n % 100}.w": ("BF16", [2, 8], bytes(32)) for n in range(9_800)}
    norms = {f"model.layers.{n}.norm.weight": ("BF16", [8], bytes(16)) for n in range(200)}
    folder = write_checkpoint(tmp_path, experts | norms, files)
    reads = Reads(monkeypatch)
    found = digest_of_checkpoint(folder)
    assert found.tensors == 10_000
    assert len(reads.sizes) <= found.reads <= MOST_READS
    assert reads.sizes.count(16) == len(norms)
    assert reads.sizes.count(16) + reads.sizes.count(32) == SAMPLED_TENSORS


def test_a_folder_of_more_files_than_may_be_read_is_unknown(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {f"layer.{n}": ("U8", [1], b"x") for n in range(400)}
    with pytest.raises(UnknownWeights, match="400 files of safetensors: more than are looked at"):
        digest_of_checkpoint(write_checkpoint(tmp_path, tensors, files=400))


def _header(nbytes: int, text: bytes) -> bytes:
    return nbytes.to_bytes(8, "little") + text


def _entry(**more: object) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **more}}).encode()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_header(1 << 40, b"{}"), "its header has 1099511627776 bytes; the file has 10"),
        (_header(3, b"{}"), "its header has 3 bytes; the file has 10"),
        (_header(0, b""), "no file of safetensors"),
        (b"abc", "the file has 3"),
        (_header(2, b"[]"), "no file of safetensors"),
        (_header(len(_entry()), _entry()), "puts x at bytes 0 to 4 of 0"),
        (_header(len(_entry(shape=[-1])), _entry(shape=[-1]) + bytes(4)), "no file of safetensors"),
        (_header(len(_entry(data_offsets=[4, 0])), _entry(data_offsets=[4, 0]) + bytes(4)), "at bytes 4 to 0 of 4"),
    ],
    ids=["huge", "longer than the file", "empty", "no length", "a list", "no data", "a shape", "backwards"],
)
def test_a_damaged_file_is_told_of_by_name(damage: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(UnknownWeights, match=said) as raised:
        digest_of_checkpoint(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(raised.value)


def test_a_header_over_the_limit_of_the_format_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((MOST_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MOST_HEADER_BYTES)
    reads = Reads(monkeypatch)
    with pytest.raises(UnknownWeights, match=f"a header {MOST_HEADER_BYTES} at most"):
        digest_of_checkpoint(tmp_path)
    assert sum(reads.sizes) < 1 << 20


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "has no weights and no safetensors"),
        (("model.Q4_K_M.gguf",), r"has weights in \.gguf and no safetensors"),
        (("pytorch_model.bin", "consolidated.pth"), r"has weights in \.bin, \.pth and no safetensors"),
    ],
)
def test_weights_in_other_formats_are_unknown(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnknownWeights, match=said):
        digest_of_checkpoint(tmp_path)


def test_files_beside_those_of_the_index_are_no_weights_of_the_model(tmp_path: Path) -> None:
    alone, beside = (write_checkpoint(tmp_path / name, tiny(), files=2) for name in ("alone", "beside"))
    write_file(beside / "consolidated.safetensors", tiny(seed=3))
    assert digest(alone) == digest(beside)


def test_one_tensor_in_two_files_is_no_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny())
    write_file(tmp_path / "more.safetensors", {MATRIX: tiny()[MATRIX]})
    with pytest.raises(UnknownWeights, match=f"both have a tensor {MATRIX}"):
        digest_of_checkpoint(tmp_path)


def test_an_index_that_names_a_file_which_is_not_there_is_told_of(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny(), files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnknownWeights, match=r"names model-00002-of-00002\.safetensors, which is not in"):
        digest_of_checkpoint(tmp_path)


def adapter(folder: Path, tensors: Tensors | None = None, **said: object) -> Path:
    folder.mkdir()
    written = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA", **said}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    write_file(folder / "adapter_model.safetensors", tensors or tiny(seed=5))
    return folder


def test_an_adapter_is_its_tensors_and_its_configuration_and_not_its_path(tmp_path: Path) -> None:
    first = digest_of_adapter(adapter(tmp_path / "first", base_model_name_or_path="/here"))
    again = adapter(
        tmp_path / "again", base_model_name_or_path="/there", target_modules=["v_proj", "q_proj"], bias=None
    )
    assert digest_of_adapter(again) == first
    assert digest_of_adapter(adapter(tmp_path / "alpha", lora_alpha=32)) != first


@pytest.mark.parametrize("at", [0, 5 << 20, -1])
def test_every_byte_of_an_adapter_counts(at: int, tmp_path: Path) -> None:
    large = bytearray(6 << 20)
    first = adapter(tmp_path / "first", {"lora_A": ("U8", [len(large)], bytes(large))})
    large[at] ^= 1
    other = adapter(tmp_path / "other", {"lora_A": ("U8", [len(large)], bytes(large))})
    assert digest_of_adapter(first) != digest_of_adapter(other)


def test_an_adapter_is_read_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter(tmp_path / "adapter")
    before, reads = digest_of_adapter(folder), Reads(monkeypatch)
    assert digest_of_adapter(folder) == before
    assert not reads.sizes
    (folder / "adapter_model.safetensors").unlink()
    write_file(folder / "adapter_model.safetensors", tiny(seed=6))
    assert digest_of_adapter(folder) != before


def test_a_folder_that_is_no_adapter_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UnknownWeights, match=r"no adapter_config\.json with safetensors beside it"):
        digest_of_adapter(tmp_path)
