"""A Llama's checkpoint is one file of safetensors in float32, mapped, so that processes share its pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LENGTH_BYTES = 8

_LAYER = "model.layers.{layer}."

#: Tensors [out, in] of each weight of the demo's model, in order. Words are those of the embedding.
LLAMA_NAMES = {
    "embedding": ("model.embed_tokens.weight",),
    "words": ("model.embed_tokens.weight",),
    "norm": ("model.norm.weight",),
    "attention_norm": (_LAYER + "input_layernorm.weight",),
    "mlp_norm": (_LAYER + "post_attention_layernorm.weight",),
    "query": (_LAYER + "self_attn.q_proj.weight",),
    "rows": (_LAYER + "self_attn.k_proj.weight", _LAYER + "self_attn.v_proj.weight"),
    "out": (_LAYER + "self_attn.o_proj.weight",),
    "gate": (_LAYER + "mlp.gate_proj.weight",),
    "up": (_LAYER + "mlp.up_proj.weight",),
    "down": (_LAYER + "mlp.down_proj.weight",),
}


def write(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Write a file of tensors in float32."""
    header, start = dict[str, Any](), 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # tensors begin at multiples of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)


def mapped(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file of `write` by name, views of its pages: nothing is read before it is used."""
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    data = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES].numpy().tobytes(), "little")
    header = json.loads(whole[_LENGTH_BYTES:data].numpy().tobytes())
    tensors = dict[str, Tensor]()
    for name, place in header.items():
        if name != "__metadata__":
            first, last = place["data_offsets"]
            tensors[name] = whole[data + first : data + last].view(torch.float32).view(place["shape"])
    return tensors
