"""From tensors to addresses, without importing torch."""

from __future__ import annotations

from typing import Protocol

from kvmover.errors import DescriptorError
from kvmover.transport.base import Descriptors, Memory, MemoryKind

_KINDS = {"cpu": MemoryKind.HOST, "cuda": MemoryKind.DEVICE}


class DeviceLike(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class TensorLike(Protocol):
    """The part of `torch.Tensor` that says where its bytes are."""

    @property
    def device(self) -> DeviceLike: ...
    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
    def is_contiguous(self) -> bool: ...


def memory_of(tensor: TensorLike) -> Memory:
    """The bytes of a contiguous CPU or CUDA tensor, which must outlive their registration."""
    device = tensor.device
    if device.type not in _KINDS:
        raise DescriptorError(f"memory of a tensor on {device} cannot be registered, only of one on cpu or cuda")
    if not tensor.is_contiguous():
        raise DescriptorError("a tensor that is not contiguous is no single range: register what it is a view of")
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        raise DescriptorError("an empty tensor has no memory")
    return Memory(_KINDS[device.type], tensor.data_ptr(), nbytes, device.index or 0)


def whole(memory: Memory) -> Descriptors:
    """All of `memory` as one run."""
    return Descriptors.runs(memory.kind, memory.address, memory.nbytes, memory.device)
