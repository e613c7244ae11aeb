"""A prefill and a decode of vLLM answer beside a plain server."""

from __future__ import annotations

from collections.abc import Sequence

from tests.live.answers import GAP, many, prompts_of
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage

_RECEIVED, _FAILED = "vllm:kvmover_received_bytes", "vllm:kvmover_received_failures"


def same_answers(
    plain: Server,
    halves: Sequence[Server],
    results: Results,
    scenario: str,
    seed: int = 20,
    at_once: int = 8,
    gap: float = GAP,
) -> None:
    """Twenty prompts through both halves, whose answers are those of `plain`. KV came, no transfer failed, and no block
    is left in use."""
    first, second = halves
    prompts = prompts_of(20, seed=seed)
    wanted = many(lambda prompt: ask(plain, prompt), prompts, at_once)
    before = second.metrics(_RECEIVED, _FAILED)
    got = many(lambda prompt: split(first, second, prompt), prompts, at_once)
    after = second.metrics(_RECEIVED, _FAILED)
    assert not results.add("vllm", scenario, wanted, got, gap=gap).failed
    assert after[f"{_RECEIVED}_total"] > before[f"{_RECEIVED}_total"]
    assert after[f"{_FAILED}_total"] == 0
    assert usage(first) == usage(second) == 0
