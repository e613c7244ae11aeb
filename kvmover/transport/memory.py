"""Tensors become addresses here, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from kvmover.errors import DescriptorError
from kvmover.transport.base import Descriptors, Memory, MemoryKind

_KINDS = {"cpu": MemoryKind.HOST, "cuda": MemoryKind.DEVICE}


class DeviceLike(Protocol):
    """The part of `torch.device` that says which memory it is."""

    @property
    def type(self) -> str:
        """`cpu` or `cuda`; others cannot be registered."""
        ...

    @property
    def index(self) -> int | None:
        """The CUDA ordinal; None of a CPU."""
        ...


class TensorLike(Protocol):
    """The part of `torch.Tensor` that says where its bytes are."""

    @property
    def device(self) -> DeviceLike:
        """Whose memory they are in."""
        ...

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def numel(self) -> int:
        """Number of elements."""
        ...

    def element_size(self) -> int:
        """Bytes of an element."""
        ...

    def is_contiguous(self) -> bool:
        """Whether its elements are one dense range, in order."""
        ...


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


def union(memories: Iterable[Memory]) -> list[Memory]:
    """What to register for `memories`, of which some may overlap, as views of one allocation do: no byte twice.

    Neighbours stay apart, since an allocation of CUDA is registered by itself: of [0, 8) [4, 12) [12, 16) the first two
    are one.
    """
    found: list[Memory] = []
    for memory in sorted(set(memories), key=lambda one: (one.kind, one.device, one.address)):
        last = found[-1] if found else None
        if last is None or (last.kind, last.device) != (memory.kind, memory.device) or memory.address >= end(last):
            found.append(memory)
        else:
            found[-1] = replace(last, nbytes=max(end(last), end(memory)) - last.address)
    return found


def end(memory: Memory) -> int:
    """The first address behind it."""
    return memory.address + memory.nbytes


def whole(memory: Memory) -> Descriptors:
    """All of `memory` as one run."""
    return Descriptors.runs(memory.kind, memory.address, memory.nbytes, memory.device)
