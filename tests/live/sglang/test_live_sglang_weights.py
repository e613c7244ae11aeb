"""Pages that SGLang kept of other weights are not found, also at one path; those of the same are, anywhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.live.answers import many, post, prompts_of
from tests.live.checkpoints import in_files, other_weights
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask, split, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, hicache, sglang
from tests.live.table import Results


def test_pages_of_a_checkpoint_that_was_replaced_are_not_found(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    source, folder, root = model("llama", "sglang"), tmp_path / "model", tmp_path / "store"
    root.mkdir()
    in_files(source, folder, 1)
    stored = hicache(root, "page_first_direct")
    (old,) = servers.start(sglang("sglang-weights-stored", folder, *stored))
    warm(plain.ready())
    prompts = prompts_of(6, seed=93, least_tokens=100, most_tokens=900)
    before = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: ask(old, prompt), prompts)
    assert not results.add("sglang", "weights that are replaced, before", before, got).failed
    assert usage(old) == 0
    servers.stop([old])

    # A copy of the store for each: what one has computed with the new weights is right for the other.
    copied = shutil.copytree(root, tmp_path / "copied")
    radix = ("--radix-cache-backend", "kvmover", *hicache(copied, "page_first_direct"))
    shutil.rmtree(folder)
    other_weights(source, folder)
    alone, new, tiers, elsewhere = servers.start(
        sglang("sglang-weights-alone", folder),
        sglang("sglang-weights-new", folder, *stored),
        sglang("sglang-weights-tiers", folder, *radix),
        sglang("sglang-weights-elsewhere", in_files(source, tmp_path / "elsewhere", 2), *stored),
    )
    wanted = many(lambda prompt: ask(alone, prompt), prompts)
    assert all(one.tokens != other.tokens for one, other in zip(before, wanted, strict=True))
    for server, scenario in (
        (new, "other weights at the same path: HiCache storage"),
        (tiers, "other weights at the same path: radix tiers"),
    ):
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        assert not results.add("sglang", scenario, wanted, got).failed
        assert not any(answer.cached_tokens for answer in got)
    got = many(lambda prompt: ask(elsewhere, prompt), prompts)
    assert not results.add("sglang", "the same weights at another path: HiCache storage", before, got).failed
    assert all(answer.cached_tokens for answer in got)


def update(server: Server, weights: Path, version: str | None) -> None:
    """Put other weights in the place of those that a server has, once nothing runs there."""
    assert usage(server) == 0
    asked = {"model_path": str(weights), "weight_version": version}
    reply = post(f"{server.url}/update_weights_from_disk", asked)
    assert (reply.status, reply.body["success"]) == (200, True), reply


def test_halves_whose_weights_are_updated_meet_in_one_version_and_nobody_without_one(
    servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    source, other = model("llama", "sglang"), other_weights(model("llama", "sglang"), tmp_path / "other")
    alone, first, second = servers.start(
        sglang("sglang-updated-alone", other),
        sglang("sglang-updated-prefill", source, mode=PREFILL),
        sglang("sglang-updated-decode", source, mode=DECODE_WITH_PREFIXES),
    )
    warm(alone)
    prompts = prompts_of(6, seed=94, least_tokens=100, most_tokens=900)
    wanted = many(lambda prompt: ask(alone, prompt), prompts)
    before = many(lambda prompt: split(first, second, prompt), prompts)
    assert all(answer.ok for answer in before), before
    assert all(one.tokens != two.tokens for one, two in zip(before, wanted, strict=True))

    update(first, other, "2")
    refused = many(lambda prompt: split(first, second, prompt, timeout_s=60), prompts)
    assert not any(answer.ok for answer in refused)
    assert max(answer.seconds for answer in refused) < 20
    said = re.search(r"peer holds weights (\w{12}) of .*this side holds weights (\w{12}), version 2 of ", second.log())
    assert said is not None
    assert said[1] == said[2]  # with which both started

    update(second, other, "2")
    got = many(lambda prompt: split(first, second, prompt), prompts)
    assert not results.add("sglang", "both halves updated to one version", wanted, got).failed

    update(second, other, None)
    refused = many(lambda prompt: split(first, second, prompt, timeout_s=60), prompts)
    assert not any(answer.ok for answer in refused)
    assert "no version of them is known: KV is shared with no engine and no store" in second.log()
    assert post(f"{second.url}/update_weight_version", {"new_version": "2"}).status == 200
    got = many(lambda prompt: split(first, second, prompt), prompts)
    assert not results.add("sglang", "a version that is named after the update", wanted, got).failed
    assert usage(first) == usage(second) == 0


def test_pages_of_weights_that_were_updated_are_not_found_and_those_of_one_version_are(
    servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    source, other, root = model("llama", "sglang"), tmp_path / "other", tmp_path / "store"
    root.mkdir()
    other_weights(source, other)
    stored = hicache(root, "page_first_direct")
    old, alone, new, tiers = servers.start(
        sglang("sglang-updated-before", source),
        sglang("sglang-updated-after", other),
        sglang("sglang-updated-store", source, *stored),
        sglang("sglang-updated-tiers", source, "--radix-cache-backend", "kvmover", *stored),
    )
    warm(old, alone)
    prompts = prompts_of(6, seed=95, least_tokens=100, most_tokens=900)
    before, wanted = (many(lambda prompt, server=server: ask(server, prompt), prompts) for server in (old, alone))
    assert all(one.tokens != two.tokens for one, two in zip(before, wanted, strict=True))
    for server in (new, tiers):
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        assert not results.add("sglang", f"before an update: {server.name}", before, got).failed
    for server, is_found in ((new, False), (tiers, True)):  # what the first has computed is there for the second
        update(server, other, "2")
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        assert not results.add("sglang", f"after an update: {server.name}", wanted, got).failed
        assert all(bool(answer.cached_tokens) is is_found for answer in got)
        assert "version 2" in server.log()
    for server in (new, tiers):
        update(server, source, None)
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        assert not results.add("sglang", f"an update without a version: {server.name}", before, got).failed
        assert not any(answer.cached_tokens for answer in got)
        assert "no version of them is known: KV is shared with no engine and no store" in server.log()
