"""Checkpoints made of others: with other numbers of the same shape, with another tokenizer, in several files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

#: Bytes of the length before a header.
_LENGTH = 8


def other_weights(source: Path, folder: Path) -> Path:
    """A copy of `source` in which values have the sign of their neighbour: tokens differ, and no shape. Returns it."""
    _copy(source, folder)
    for file in folder.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        start = _LENGTH + int.from_bytes(raw[:_LENGTH], "little")
        data = raw[start:]
        # Of little-endian floats of 4 bytes the last has the sign.
        signs = data[3::4]
        data[3::4] = bytes(
            (own & 0x7F) | (next_ & 0x80) for own, next_ in zip(signs, signs[1:] + signs[:1], strict=True)
        )
        file.write_bytes(bytes(raw[:start] + data))
    return folder


def other_tokenizer(source: Path, folder: Path) -> Path:
    """A copy of `source` in which each byte has its neighbour's token id: texts are as long, and mean another prompt.
    Returns it."""
    _copy(source, folder)
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    ids = told["model"]["vocab"]
    told["model"]["vocab"] = {word: (number + 1) % 256 if number < 256 else number for word, number in ids.items()}
    file.write_text(json.dumps(told))
    return folder


def in_files(source: Path, folder: Path, count: int) -> Path:
    """A copy of `source` whose tensors are in `count` files, with an index. Returns it."""
    _copy(source, folder)
    (single,) = folder.glob("*.safetensors")
    raw = single.read_bytes()
    start = _LENGTH + int.from_bytes(raw[:_LENGTH], "little")
    header = json.loads(raw[_LENGTH:start])
    header.pop("__metadata__", None)
    names, placed = sorted(header), dict[str, str]()
    for number in range(count):
        own, data = dict[str, object](), b""
        for name in names[number::count]:
            first, last = header[name]["data_offsets"]
            own[name] = {**header[name], "data_offsets": [len(data), len(data) + last - first]}
            data += raw[start + first : start + last]
        text = json.dumps({"__metadata__": {"format": "pt"}, **own}).encode()
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        (folder / file).write_bytes(len(text).to_bytes(_LENGTH, "little") + text + data)
        placed |= dict.fromkeys(own, file)
    single.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def copied_adapters(folder: Path, third: str, model: Callable[[str, str], Path], engine: str) -> list[str]:
    """Adapters as `NAME=PATH`: `A` and `B`, copied into `folder`, and `C`, which is `third` of them. Returns these."""
    seeds = {"A": 1, "B": 2}
    for name, seed in {**seeds, "C": seeds[third]}.items():
        shutil.copytree(model(f"adapter-{seed}", engine), folder / name)
    return [f"{name}={folder / name}" for name in (*seeds, "C")]


def _copy(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*"))
