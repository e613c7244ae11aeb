"""SGLang halves that cannot have the same KV: they refuse each other, and say what either holds."""

from __future__ import annotations

from pathlib import Path

from tests.live.checkpoints import in_files
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import OTHER_KEY, mistake, not_mixed_up, sentence, tells_weights_apart
from tests.live.server import Server
from tests.live.sglang_client import usage, warm
from tests.live.sglang_partners import PATIENCE, PATIENCE_S, Halves, Lab, decodes_of_other_models, one_for_another
from tests.live.sglang_servers import DECODE, PREFILL, sglang
from tests.live.table import Results


def test_halves_of_other_models_refuse_each_other_and_of_the_same_meet_anywhere(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    source, folder, keys = model("llama", "sglang"), tmp_path / "model", tmp_path / "key"
    in_files(source, folder, 1)
    keys.write_bytes(bytes(range(32)))
    (first,) = servers.start(sglang("sglang-partners-prefill", folder, mode=PREFILL, environment=PATIENCE))
    sealed = {**PATIENCE, "KVMOVER_SECURITY_SHARED_KEY_FILE": str(keys)}
    others = {
        **decodes_of_other_models("sglang-partners", folder, model),
        OTHER_KEY: sglang("sglang-partners-key", source, mode=DECODE, environment=sealed),
    }
    elsewhere = in_files(source, tmp_path / "same", 3)
    same, *decodes = servers.start(
        sglang("sglang-partners-same", elsewhere, mode=DECODE, environment=PATIENCE), *others.values()
    )
    warm(plain.ready())
    right = Lab(plain, Halves(first, same, first))
    asked = [each for each, _ in not_mixed_up(92)]
    wanted = right.alone(asked)
    assert not results.add(
        "sglang", "the same weights in other files at another path", wanted, right.through(asked)
    ).failed
    for number, (what, decode) in enumerate(zip(others, decodes, strict=True)):
        made = not_mixed_up(93 + number)
        asked = [each for each, _ in made]
        got = one_for_another(Halves(first, decode, first), made, 60.0)
        said = sentence(decode, "the peer's card" if what == OTHER_KEY else "peer holds weights")
        assert tells_weights_apart(said) or "weights" not in what
        wanted = right.alone(asked)
        assert mistake(results, "sglang", what, wanted, got, lambda asked=asked: right.through(asked), said) == len(got)
        assert max(answer.seconds for answer in got) < 2 * PATIENCE_S
        assert usage(decode, 20) == 0
    assert usage(first, 20) == usage(same) == 0
