"""vLLM halves that cannot have the same KV: decode computes, and both say what either holds."""

from __future__ import annotations

from pathlib import Path

from tests.live.checkpoints import in_files
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import OTHER_KEY, mistake, not_mixed_up, sentence, tells_weights_apart
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import usage, warm
from tests.live.vllm_partners import RESETS, Halves, alone, decodes_of_other_models, forget, one_for_another
from tests.live.vllm_servers import kvmover, vllm


def test_halves_of_other_models_take_nothing_of_each_other_and_of_the_same_meet_anywhere(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    source, folder, key = model("qwen3", "vllm"), tmp_path / "model", tmp_path / "key"
    in_files(source, folder, 1)
    key.write_bytes(bytes(range(32)))
    (first,) = servers.start(vllm("vllm-partners-prefill", folder, kv=kvmover()))
    sealed = {**RESETS, "KVMOVER_SECURITY_SHARED_KEY_FILE": str(key)}
    others = {
        **decodes_of_other_models("vllm-partners", folder, model, kv=kvmover(), environment=RESETS),
        OTHER_KEY: vllm("vllm-partners-key", source, kv=kvmover(), environment=sealed),
    }
    elsewhere = in_files(source, tmp_path / "same", 3)
    same, *decodes = servers.start(vllm("vllm-partners-same", elsewhere, kv=kvmover(policy="fail")), *others.values())
    warm(plain.ready(), first, same, *decodes)
    made = not_mixed_up(92)
    wanted, got = alone(plain, [each for each, _ in made]), one_for_another(Halves(first, same, first), made, 60.0)
    assert not results.add("vllm", "the same weights in other files at another path", wanted, got).failed
    moved = same.metrics("vllm:kvmover_received_requests_total")
    assert moved["vllm:kvmover_received_requests_total"] == len(made)
    for number, (what, decode) in enumerate(zip(others, decodes, strict=True)):
        made = not_mixed_up(93 + number)
        asked = [each for each, _ in made]
        wanted = alone(decode, asked)  # before it has met anybody
        forget(decode)
        got = one_for_another(Halves(first, decode, first), made, 60.0)
        said = sentence(decode, "the peer's card" if what == OTHER_KEY else "peer holds weights")
        assert tells_weights_apart(said) or "weights" not in what
        assert mistake(results, "vllm", what, wanted, got, lambda: alone(decode, asked), said) == 0  # noqa: B023
        assert not any(decode.metrics("vllm:kvmover_received_bytes").values())
        assert usage(decode) == 0
    # What was refused is held until its deadline.
    assert usage(first, 40) == usage(same) == 0
