"""Blocks that vLLM kept of other weights are not found, also at one path."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.live.answers import many, prompts_of
from tests.live.checkpoints import in_files, other_weights
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_servers import kvmover, vllm


def test_a_checkpoint_that_was_replaced_is_no_longer_the_one_before(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    source, folder, root = model("qwen3", "vllm"), tmp_path / "model", tmp_path / "store"
    root.mkdir()
    in_files(source, folder, 1)
    (old,) = servers.start(vllm("vllm-weights-old", folder, kv=kvmover(root=str(root), upkeep_s=1, flush_s=1)))
    warm(plain.ready(), old)
    prompts = prompts_of(6, seed=90, least_tokens=100, most_tokens=900)
    before = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: ask(old, prompt), prompts)
    assert not results.add("vllm", "weights that are replaced, before", before, got).failed

    shutil.rmtree(folder)
    other_weights(source, folder)
    new, alone = servers.start(
        vllm("vllm-weights-new", folder, kv=kvmover(root=str(root), upkeep_s=1)), vllm("vllm-weights-alone", folder)
    )
    wanted = many(lambda prompt: ask(alone, prompt), prompts)
    assert all(one.tokens != other.tokens for one, other in zip(before, wanted, strict=True))
    got = many(lambda prompt: ask(new, prompt), prompts)
    assert not results.add("vllm", "other weights at the same path: page store", wanted, got).failed
    assert not any(new.metrics("vllm:kvmover_loaded_blocks").values())
    assert usage(old) == usage(new) == 0
