"""One process of stages that run apart: it takes a step when the stage before has, and says when operations ended."""

from __future__ import annotations

import json
import os
import random
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from kvmover.cache.tiers.agreement import CollectiveOp, CollectiveOps, Pipelined

STEPS, STAGE_RANKS = 60, 2


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(FileStore(str(folder / "meet"), size), rank, size, timedelta(seconds=30))
    taken = FileStore(str(folder / "taken"), size)
    consensus, collectives = Pipelined(group, STAGE_RANKS), CollectiveOps()
    plan, own = random.Random(5), random.Random(rank)
    due: list[tuple[int, CollectiveOp]] = []
    ended: list[tuple[int, int, list[int]]] = []
    step = 0
    while step < STEPS or collectives.open:
        if rank >= STAGE_RANKS:  # as if it were sent in that stage's step
            taken.wait([f"{rank - STAGE_RANKS} has taken step {step}"], timedelta(seconds=30))
        for at, collective in due:
            if at == step:
                collective.done(rank, 100 + collective.serial)
        votes = collectives.votes()
        agreed = consensus.minimum(votes) if collectives.open else votes
        over = [] if agreed is None else collectives.settle(agreed)
        ended += [(step, collective.serial, answer.tolist()) for collective, answer in over]
        if step < STEPS and plan.random() < 0.5:
            begun = collectives.begin(lambda agreed: None, 2)
            due.append((step + 1 + own.randrange(4), begun))
        taken.set(f"{rank} has taken step {step}", "")
        step += 1
    taken.set(f"{rank} is over", "")
    taken.wait([f"{number} is over" for number in range(size)], timedelta(seconds=30))
    sys.stdout.write(json.dumps(ended))
    sys.stdout.flush()
    os._exit(0)
