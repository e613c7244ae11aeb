"""vLLM halves that store their caches in unlike forms: rows are converted on the way."""

from __future__ import annotations

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_pairs import same_answers
from tests.live.vllm_servers import kvmover, vllm

_FP8 = ("--kv-cache-dtype", "fp8")

#: Consent to the rounding of fp8, on both sides.
_LOSSY = {"KVMOVER_MOVER_LOSSY": "0.0625"}


def test_a_cache_of_fp8_gets_the_bits_that_its_own_server_writes(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    """The model has one layer, whose keys and values no rounding of an earlier layer has touched: converted from
    float32 they are those of a plain server whose cache is fp8, and so are all tokens and log probabilities."""
    weights = model("qwen3-shallow", "vllm")
    plain, first, second = servers.start(
        vllm("vllm-fp8-plain", weights, *_FP8),
        vllm("vllm-fp8-prefill-float32-tp2", weights, kv=kvmover(), tp=2, environment=_LOSSY),
        vllm("vllm-fp8-decode", weights, *_FP8, kv=kvmover(), environment=_LOSSY, block_tokens=32),
    )
    warm(plain, first, second)
    same_answers(plain, (first, second), results, "float32 of TP2 converted to fp8 of TP1", 80)
    servers.stop()


def test_halves_of_unlike_forms_refuse_each_other_without_consent(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    """Decode computes, so that its answers are those of its own cache; its log names both forms."""
    weights = model("qwen3-shallow", "vllm")
    plain, first, second = servers.start(
        vllm("vllm-fp8-plain", weights, *_FP8),
        vllm("vllm-fp8-prefill-refused", weights, kv=kvmover()),
        vllm("vllm-fp8-decode-refusing", weights, *_FP8, kv=kvmover()),
    )
    warm(plain, first, second)
    prompts = prompts_of(20, seed=81)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: split(first, second, prompt), prompts)
    assert not results.add("vllm", "float32 beside fp8 without consent", wanted, got, "computed by decode").failed
    assert not second.metrics("vllm:kvmover_received_bytes")["vllm:kvmover_received_bytes_total"]
    assert "float8_e4m3fn" in second.log()
    assert usage(first, 30.0) == usage(second) == 0  # what nobody fetched is held for `deadline_s`, 20 s
    servers.stop()
