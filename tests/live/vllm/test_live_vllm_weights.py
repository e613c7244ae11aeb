"""Which weights vLLM serves: others are refused with both digests, also at one path; the same meet anywhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.live.answers import many, prompts_of
from tests.live.checkpoints import in_files, other_weights
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import kvmover, vllm


def test_a_checkpoint_that_was_replaced_is_no_longer_the_one_before(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """Prefill and store have the old weights; decode has new ones at the same path; another the old ones elsewhere."""
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
    new, alone, same = servers.start(
        vllm("vllm-weights-new", folder, kv=kvmover(root=str(root), upkeep_s=1)),
        vllm("vllm-weights-alone", folder),
        vllm("vllm-weights-elsewhere", in_files(source, tmp_path / "elsewhere", 3), kv=kvmover(policy="fail")),
    )
    wanted = many(lambda prompt: ask(alone, prompt), prompts)
    assert all(one.tokens != other.tokens for one, other in zip(before, wanted, strict=True))
    for scenario, got in (
        ("other weights at the same path: page store", many(lambda prompt: ask(new, prompt), prompts)),
        ("other weights at the same path: decode", many(lambda prompt: split(old, new, prompt), prompts)),
    ):
        assert not results.add("vllm", scenario, wanted, got).failed
    counted = new.metrics("vllm:kvmover_loaded_blocks", "vllm:kvmover_received_bytes")
    assert not any(counted.values())
    said = re.search(r"peer holds weights (\w{12}) of (\S+) .*this side holds weights (\w{12}) of (\S+) ", new.log())
    assert said is not None
    assert said[1] != said[3]
    assert said[2] == said[4] == str(folder)

    fresh = prompts_of(6, seed=91, least_tokens=100, most_tokens=900)
    wanted = many(lambda prompt: ask(plain, prompt), fresh)
    got = many(lambda prompt: split(old, same, prompt), fresh)
    assert not results.add("vllm", "the same weights in other files at another path", wanted, got).failed
    moved = same.metrics("vllm:kvmover_received_requests")
    assert moved["vllm:kvmover_received_requests_total"] == len(fresh)
    # What was refused is held until its deadline.
    assert usage(old, 40) == usage(same) == usage(new) == 0
