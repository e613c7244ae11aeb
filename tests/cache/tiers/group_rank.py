"""One process of a real group: it serves a prompt, forgets it, restores it, and says what it got."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from rig import EAGER, Rank
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from kvmover.cache.tiers import ControllerConfig, Grouped
from kvmover.layout import Fleet
from tests.store.segments import condemn, segments_of

PROMPT = list(range(33))


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "meet"), size)
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
    setup = ControllerConfig(EAGER, consensus=Grouped(group))
    mine = Rank(folder / "store", fleet=Fleet(tp=size, page_tokens=8), rank=rank, setup=setup)
    mine.serve(PROMPT)
    mine.controller.wait()
    mine.forget()
    mine.poison_free()
    if rank == 1:  # its part of one page is bad, and no other rank knows
        storage = mine.controller._backups.parts.storage
        assert storage is not None
        view = storage.stored_pools[0].view
        entry = segments_of(mine.store).catalog.index.get(mine.hashes(PROMPT)[3])
        assert entry is not None
        plan = view._plan(entry.parts)
        assert plan is not None
        condemn(mine.store, entry.objects[plan[0].number])
    restore = mine.serve(PROMPT)
    mine.controller.wait()
    mine.conserved()
    lost = {str(reason): tokens for reason, tokens in restore.lost.items()}
    words = restore.tokens, restore.credit.storage_tokens, mine.controller.collectives.serial, lost
    sys.stdout.write(json.dumps(words))
    sys.stdout.flush()
    mine.close()
    os._exit(0)
