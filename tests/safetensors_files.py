"""Checkpoints in safetensors, written byte by byte: the project reads them itself, and so do its tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

#: Tensors by name: dtype as the format calls it, shape, bytes.
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]


def tiny(seed: int = 1, layers: int = 2) -> dict[str, tuple[str, list[int], bytes]]:
    """An embedding, and in every layer a norm and a matrix, of float32 drawn by `seed`."""
    drawn = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": [64, 32], "lm_head.weight": [64, 32]}
    for layer in range(layers):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = [32]
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = [32, 32]
    return {name: ("F32", shape, drawn.random(shape, np.float32).tobytes()) for name, shape in shapes.items()}


def write_file(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """One file. The bytes of tensors follow each other in the order of `tensors`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def write_checkpoint(folder: Path, tensors: Tensors, files: int = 1) -> Path:
    """A folder of so many files: one without an index, several with one. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        write_file(folder / "model.safetensors", tensors, {"format": "pt"})
        return folder
    names = sorted(tensors, key=lambda name: name[::-1])
    placed: dict[str, str] = {}
    for number in range(files):
        name, own = f"model-{number + 1:05}-of-{files:05}.safetensors", names[number::files]
        write_file(folder / name, {each: tensors[each] for each in own})
        placed |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder
