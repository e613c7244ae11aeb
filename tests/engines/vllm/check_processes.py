"""A prefill engine in a process of its own that is killed, and the decode engine that waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import Engine, Shape, layer_name, truth

HERE = Path(__file__).parent
Prefill = subprocess.Popen[str]
PROMPT = [7 * n % 900 + 1 for n in range(100)]


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[Prefill]:
    process = subprocess.Popen(
        [sys.executable, HERE / "prefill_process.py", tmp_path / "model", "both"],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _killed_when_tokens_landed(prefill: Prefill, decode: Engine) -> None:
    """The decode has asked, and has the first 64 tokens of 100."""
    assert prefill.stdin is not None
    assert prefill.stdout is not None
    address = json.loads(next(line for line in prefill.stdout if line.startswith("{")))
    decode.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "transfer_id": "both", **address})
    decode.step()
    prefill.stdin.write(json.dumps(PROMPT) + "\n")
    prefill.stdin.flush()
    next(line for line in prefill.stdout if line.startswith("computed"))
    decode.until(lambda: _landed(decode), "the first 64 tokens")
    prefill.kill()


@pytest.mark.parametrize("options", [{"verb": "push", "route": "packed"}, {"verb": "pull", "route": "direct"}], ids=str)
def test_a_prefill_that_is_killed_is_noticed_and_its_prompt_computed(
    tmp_path: Path, prefill: Prefill, options: dict[str, str]
) -> None:
    decode = Engine(Shape(options=(("chunk_bytes", 4096), *options.items())), tmp_path / "model")
    try:
        _killed_when_tokens_landed(prefill, decode)
        decode.finish("d-1")
        assert decode.said["d-1"] == [1] * 5
        assert decode.stats["received_failures"] == 1
        assert decode.computed[0][1] == (64 if options.get("verb") == "push" else 0)
        decode.drain()
    finally:
        decode.close()


@pytest.mark.parametrize(("policy", "tp"), [("recompute", 2), ("fail", 1)], ids=str)
def test_a_failure_is_told_while_a_dead_prefill_may_still_write_and_nobody_gets_those_blocks(
    tmp_path: Path, prefill: Prefill, monkeypatch: pytest.MonkeyPatch, policy: str, tp: int
) -> None:
    """The prompt is computed into other blocks, or its client is told, while what the dead may write is held."""
    monkeypatch.setenv("KVMOVER_MOVER_LINGER_S", "15")
    options = (("chunk_bytes", 4096), ("verb", "push"), ("route", "direct"))
    decode = Engine(Shape(options=options, policy=policy, tp=tp), tmp_path / "model")
    pool = decode.scheduler.kv_cache_manager.block_pool
    try:
        _killed_when_tokens_landed(prefill, decode)
        written = {block for table in decode.tables("d-1") for block in table}
        seen: list[set[int]] = []
        decode.before_layer = lambda rank, number: seen.append({b for t in decode.tables("d-1") for b in t})
        decode.finish("d-1")
        if policy == "recompute":
            assert decode.said["d-1"] == [1] * 5
            assert decode.computed[0] == ("d-1", 0, 100)
            assert seen
            assert not written & set().union(*seen)
        else:
            assert "error" in str(decode.ended["d-1"]).lower()
        assert decode.scheduler.has_requests(), "vLLM would step no more, and hear of nothing"
        assert pool.get_num_free_blocks() == decode.shape.blocks - 1 - len(written)
        decode.drain()
    finally:
        decode.close()


def _landed(decode: Engine) -> bool:
    held = {rank: rank.rows(layer_name(3), decode.tables("d-1"), range(64)) for rank in decode.ranks}
    return all((rows == truth(PROMPT, range(64), 3, rank.heads, 64)).all() for rank, rows in held.items())
