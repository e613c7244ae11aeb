"""Blocks that vLLM kept of other weights are not found, also at one path; servers that are updated meet by version."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.live.answers import many, post, prompts_of
from tests.live.checkpoints import in_files, other_weights
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, labelled
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import DRAINED, OFFLOADING, kvmover, tiered, vllm


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


#: The routes by which trainers update a server.
_TRAINED = {"VLLM_SERVER_DEV_MODE": "1"}


def updated(server: Server, weights: Path, version: str | None) -> None:
    """As trainers do: pause, put other weights in the place of those that are there, say what they are, and go on."""
    said = [
        ("pause", {}),
        ("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}),
        *([("update_weight_version", {"new_version": version})] if version else []),
        ("resume", {}),
    ]
    for route, body in said:
        reply = post(f"{server.url}/{route}", body)
        assert reply.status == 200, f"{route}: {reply.error}"


def fetched(server: Server) -> float:
    (count,) = server.metrics("vllm:kvmover_received_requests").values()
    return count


def test_weights_that_are_updated_in_running_servers_meet_by_their_version_alone(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """Prefill first, decode later, then prefill without a version, which it gets at last."""
    old = model("qwen3", "vllm")
    new = other_weights(old, tmp_path / "new")
    prefill, decode, alone = servers.start(
        vllm("vllm-updated-prefill", old, kv=kvmover(), tp=2, environment=_TRAINED),
        vllm("vllm-updated-decode", old, kv=kvmover(), environment=_TRAINED),
        vllm("vllm-updated-alone", new),
    )
    warm(plain.ready(), prefill, decode, alone)
    known = prompts_of(6, seed=92, least_tokens=100, most_tokens=900)
    fresh = [prompts_of(6, seed=seed, least_tokens=100, most_tokens=900) for seed in (93, 94, 95)]
    before = fetched(decode)

    def halves(scenario: str, like: Server, prompts: list[list[int]], moved: int) -> None:
        nonlocal before
        wanted = many(lambda prompt: ask(like, prompt), prompts)
        got = many(lambda prompt: split(prefill, decode, prompt), prompts)
        now, said = fetched(decode), f"{moved} moved"
        assert not results.add("vllm", f"weights that are updated: {scenario}", wanted, got, said).failed
        before, count = now, now - before
        assert count == moved

    halves("before", plain, known, 6)
    updated(prefill, new, "7")
    halves("prefill alone, to a version", plain, fresh[0], 0)
    said = re.search(r"peer holds weights (\w{12}), version 7 of .*this side holds weights (\w{12}) of ", decode.log())
    assert said is not None
    assert said[1] == said[2]
    updated(decode, new, "7")
    halves("both, to one version", alone, [*known, *fresh[1]], 12)
    updated(prefill, old, None)
    halves("prefill alone, without a version", alone, fresh[2], 0)
    assert "and no version of them is known: KV is shared with no engine and no store" in prefill.log()
    updated(decode, old, "8")
    assert post(f"{prefill.url}/update_weight_version", {"new_version": "8"}).status == 200
    halves("both, the version of one told later", plain, known, 6)
    assert usage(prefill, 40) == usage(decode) == 0


def test_chunks_of_weights_that_are_updated_are_found_by_their_version_alone(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """One server offloads, is updated and offloads again; another finds what is of its own weights, both times."""
    old, root = model("qwen3", "vllm"), tmp_path / "store"
    root.mkdir()
    new, both = other_weights(old, tmp_path / "new"), {**OFFLOADING, **_TRAINED}
    first, second, alone = servers.start(
        vllm("vllm-updated-tier", old, *DRAINED, kv=tiered(root), environment=both),
        vllm("vllm-updated-tier-later", old, *DRAINED, kv=tiered(root), environment=both),
        vllm("vllm-updated-tier-alone", new),
    )
    warm(plain.ready(), first, second, alone)
    prompts = prompts_of(6, seed=96, least_tokens=100, most_tokens=900)
    for like, when in ((plain, "before"), (alone, "after")):
        wanted = many(lambda prompt, like=like: ask(like, prompt), prompts)
        read = [labelled(server, "vllm:kvmover_tier_loads_total", "read") for server in (first, second)]
        for server, title in ((first, "written"), (second, "read")):
            if when == "after":
                updated(server, new, "7")
            got = many(lambda prompt, server=server: ask(server, prompt), prompts)
            assert not results.add("vllm", f"tier, weights that are updated: {title} {when}", wanted, got).failed
            assert usage(server) == 0
        now = [labelled(server, "vllm:kvmover_tier_loads_total", "read") for server in (first, second)]
        assert now[0] == read[0]
        assert now[1] - read[1] >= sum(len(prompt) // 16 - 1 for prompt in prompts)
