"""Pages that SGLang kept of other weights are not found, also at one path; those of the same are, anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.live.answers import many, prompts_of
from tests.live.checkpoints import in_files, other_weights
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask, usage, warm
from tests.live.sglang_servers import hicache, sglang
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
