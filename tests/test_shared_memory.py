"""Memory that other processes map: which allocation an address lies in."""

from __future__ import annotations

import ctypes

import pytest

from kvmover import shared_memory


class _Collecting:
    """A description of an allocation at whose reading another allocation is freed, as a collection of garbage may."""

    fd, nbytes = -1, 0

    def __init__(self, freed: str) -> None:
        self._freed = freed

    @property
    def address(self) -> int:
        shared_memory._ALLOCATED.pop(self._freed, None)
        return 0


def test_an_allocation_is_found_while_others_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("first", "gone"):
        monkeypatch.setitem(shared_memory._ALLOCATED, token, _Collecting("gone"))
    memory = shared_memory.allocate(4096)
    (share,) = shared_memory.shares_of([(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 64, 128)])
    assert share is not None
    assert share.offset == 64
