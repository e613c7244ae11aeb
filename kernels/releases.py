"""A thread gives CUDA memory back when its owner has died and the device is done.

A finaliser runs in whichever thread drops the last reference, with any context or none, and in the middle of another's
graph capture. So it calls nothing of CUDA's: it hands the release to this thread.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from . import cuda_driver

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Releases:
    """The releases that are due, and the thread that makes them in turn. It starts with the first memory."""

    _due: SimpleQueue[tuple[torch.device, Callable[[], None]]] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None

    def when_dead(self, owner: object, device: torch.device, give_back: Callable[[], None]) -> None:
        """Call `give_back` in the context of `device` after `owner` died and the device has done what was queued."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvmover-releases", daemon=True)
            self._thread.start()
        weakref.finalize(owner, self._due.put, (device, give_back)).atexit = False

    def _run(self) -> None:
        cuda_driver.leave_captures_alone()
        while True:
            device, give_back = self._due.get()
            try:
                wait_for(device)
                give_back()
            except Exception:  # of torch or the driver: this memory is lost, and others' is still given back
                log.exception("memory of %s is lost until the process ends", device)


def wait_for(device: torch.device) -> None:
    """Make `device` this thread's, and wait until it has done all work."""
    import torch

    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


#: The releases of this process.
RELEASES = Releases()
