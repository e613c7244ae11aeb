"""A prefill in a process of its own: `serving_process.py FOLDER TOKENS` offers 0, 1, 2 ... as "r", and waits.

It stops in the middle of the prompt when a third argument is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tiny_models import load

from kvmover.engines.transformers import TransformersEngine


def hang(*_: object, **__: object) -> None:
    sys.stdout.write("half\n")
    sys.stdout.flush()
    time.sleep(600)


with TransformersEngine(load(Path(sys.argv[1])), {"chunk_tokens": 64}) as engine:
    sys.stdout.write(f"{engine.rank.port}\n")
    sys.stdout.flush()
    if len(sys.argv) > 3:
        engine._first = hang  # pyright: ignore
    engine.serve(list(range(int(sys.argv[2]))), "r", do_sample=False)
    sys.stdin.readline()
