"""LoRA adapters between SGLang's halves: told by their bytes, whatever their name and their path."""

from __future__ import annotations

import pytest

from tests.live.answers import prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import ADAPTERS, Asked, mistake, sentence
from tests.live.sglang_client import counted, usage, warm
from tests.live.sglang_partners import Halves, Lab, meant, of_adapters, one_for_another, with_adapters
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results


@pytest.fixture(scope="module")
def lab(servers: Servers, model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """`C` is one adapter at the prefill, and another at the decode and the plain server."""
    weights, copies = model("llama", "sglang"), tmp_path_factory.mktemp("adapters")
    plain, prefill, decode = servers.start(
        *(
            sglang(f"sglang-adapters-{name}", weights, *with_adapters(copies / name, third, model), mode=mode)
            for name, third, mode in (
                ("plain", "B", ()),
                ("prefill", "A", PREFILL),
                ("decode", "B", DECODE_WITH_PREFIXES),
            )
        )
    )
    warm(plain)
    return Lab(plain, Halves(prefill, decode, prefill))


def test_an_adapter_is_the_same_at_two_paths(lab: Lab, results: Results) -> None:
    prompts = prompts_of(6, seed=151, least_tokens=100, most_tokens=300)
    said = {}, {"lora_path": "A"}, {"lora_path": "B"}
    asked = [Asked(prompt, each) for each in said for prompt in prompts]
    wanted = lab.alone(asked)
    assert len({answer.tokens for answer in wanted}) == len(asked)  # each adapter says something else
    before = counted(lab.halves.decode, "kvmover_received_bytes_total")
    got = lab.through(asked)
    assert not results.add("sglang", "two adapters and none, each from another path", wanted, got).failed
    assert counted(lab.halves.decode, "kvmover_received_bytes_total") > before


@pytest.mark.parametrize("what", ADAPTERS)
def test_kv_of_another_adapter_is_refused(lab: Lab, results: Results, what: str) -> None:
    made = of_adapters(what)
    asked = [other for _, other in made]
    got = one_for_another(lab.halves, made, 60.0)
    said = sentence(lab.halves.decode, "the KV is of")
    refused = mistake(results, "sglang", what, lab.alone(asked), got, lambda: lab.through(meant(asked)), said)
    assert refused == len(got)
    assert usage(lab.halves.decode, 20) == 0
