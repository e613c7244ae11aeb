"""Marks are events behind all work that an engine has launched on its device: gates and copies wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A CUDA event, or its equivalent on a device that computes synchronously."""

    def query(self) -> bool:
        """Returns True if the event has passed, without waiting."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the event has passed."""
        ...


class Mark(Protocol):
    """A function that records an event behind all computation so far."""

    def __call__(self) -> Event: ...


class _Now:
    """The event of a device that computes synchronously."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""


def marks(device: torch.device) -> Mark:
    """Returns a function that records an event behind the work of `device`."""
    if device.type != "cuda":
        return _Now
    import torch

    def mark() -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    return mark
