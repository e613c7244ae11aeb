"""A prefill engine in a process of its own that is killed, and the decode engine that waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import Engine, Shape, layer_name, truth

HERE = Path(__file__).parent
PROMPT = [7 * n % 900 + 1 for n in range(100)]


@pytest.mark.parametrize("options", [{"verb": "push", "route": "packed"}, {"verb": "pull", "route": "direct"}], ids=str)
def test_a_prefill_that_is_killed_is_noticed_and_its_prompt_computed(tmp_path: Path, options: dict[str, str]) -> None:
    prefill = subprocess.Popen(
        [sys.executable, HERE / "prefill_process.py", tmp_path / "model", "both"],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert prefill.stdin is not None
    assert prefill.stdout is not None
    decode = Engine(Shape(options=(("chunk_bytes", 4096), *options.items())), tmp_path / "model")
    try:
        address = json.loads(next(line for line in prefill.stdout if line.startswith("{")))
        decode.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "transfer_id": "both", **address})
        decode.step()
        prefill.stdin.write(json.dumps(PROMPT) + "\n")
        prefill.stdin.flush()
        next(line for line in prefill.stdout if line.startswith("computed"))
        decode.until(lambda: _landed(decode), "the first 64 tokens")
        prefill.kill()
        decode.finish("d-1")
        assert decode.said["d-1"] == [1] * 5
        assert decode.stats["received_failures"] == 1
        assert decode.computed[0][1] == (64 if options.get("verb") == "push" else 0)
        decode.drain()
    finally:
        prefill.kill()
        prefill.wait()
        decode.close()


def _landed(decode: Engine) -> bool:
    held = decode.ranks[0].rows(layer_name(3), decode.tables("d-1"), range(64))
    return bool((held == truth(PROMPT, range(64), 3, range(4), 64)).all())
