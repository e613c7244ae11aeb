"""A prefill engine in a process of its own: says where it is, computes a prompt up to the last layer, and waits there.

`prefill_process.py FOLDER TRANSFER`: the model's folder, and the request's name between engines.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bench import Engine, Rank, Shape


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def stop(rank: Rank, number: int) -> None:
    """In the second step, of tokens 64 to 100, whose last layer never comes."""
    if len(engine.computed) == 2 and number == 3:
        say("computed")
        time.sleep(600)


engine = Engine(Shape(batch_tokens=64), Path(sys.argv[1]))
engine.before_layer = stop
home = engine.scheduler.get_kv_connector()._scheduler.home
say(json.dumps({"remote_engine_id": home.engine, "remote_host": home.host, "remote_port": home.port}))
prompt = json.loads(sys.stdin.readline())
engine.ask("p-1", prompt, params={"do_remote_decode": True, "transfer_id": sys.argv[2]})
engine.finish("p-1")
