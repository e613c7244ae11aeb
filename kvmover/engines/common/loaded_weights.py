"""Weights in memory beside the files that they were loaded from: whether they are the same, and whether they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvmover.engines.common.checkpoint import UnknownWeights, samples_of

if TYPE_CHECKING:
    import torch

#: Names of torch for the numbers in safetensors that engines cast as they load them.
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_loaded(folder: Path, held: Mapping[str, torch.Tensor]) -> None:
    """Raise UnknownWeights, with the name, if a sampled tensor of `folder` has other values in memory: a LoRA adapter
    was merged into it, or it was trained. `held` has a model's tensors by name; a cast of all is no difference.

    Names and shapes that only one side has are left out. Raises UnknownWeights if there are no others.
    """
    import torch

    known = 0
    for place, first, sample in samples_of(folder):
        memory = held.get(place.name)
        if memory is None or place.dtype not in _FLOATS or tuple(memory.shape) != place.shape:
            continue
        known += 1
        there = torch.frombuffer(bytearray(sample), dtype=getattr(torch, _FLOATS[place.dtype])).to(memory.dtype)
        here = memory.detach().reshape(-1)[first : first + len(there)].cpu()
        if not torch.equal(there.view(torch.uint8), here.view(torch.uint8)):
            raise UnknownWeights(f"{place.name} in memory has other values than in {folder}")
    if not known:
        raise UnknownWeights(f"no tensor in memory has the name and shape of one in {folder}")


def changes_of(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns a value that is another after every change of `parameters` that torch counts: an optimizer's step, a
    `copy_`, another tensor in place of one.
    """
    return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in parameters]
