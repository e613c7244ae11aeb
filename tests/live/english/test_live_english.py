"""A trained model answers in English through a prefill and a decode of either make: the tokens are a plain server's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import pytest

from perf import record
from tests.live.answers import many
from tests.live.conftest import Servers
from tests.live.english.trained_models import TRAINED, TrainedModel
from tests.live.exchange import ask, exchanging_sglang, exchanging_vllm, received_bytes, routed
from tests.live.server import Command
from tests.live.sglang_servers import DECODE, PREFILL, sglang
from tests.live.table import Results
from tests.live.transformers_servers import transformers
from tests.live.vllm_servers import vllm

#: SGLang fills its pool with zeros: rows of a trained model for 32,768 tokens would be 1.5 GB a server.
_ROOM = ("--max-total-tokens", "8192")

#: Requests under way: two cores compute them.
_AT_ONCE = 4

_NAMES = {"sglang": "SGLang", "vllm": "vLLM", "transformers": "transformers"}


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a pair. `ranks`: of the tensor parallelism, 0 for as many as the model's heads can be split over."""

    engine: str
    ranks: int
    page_tokens: int

    def tp(self, model: TrainedModel) -> int:
        return self.ranks or model.tp

    def command(self, model: TrainedModel, mode: tuple[str, ...]) -> Command:
        """The server that computes prompts, or that answers."""
        name, folder = f"{model.name}-{self.engine}-{mode[0]}", model.folder()
        if self.engine == "transformers":
            return transformers(name, folder, page_tokens=self.page_tokens)
        if self.engine == "vllm":
            return exchanging_vllm(name, folder, tp=self.tp(model), block_tokens=self.page_tokens)
        return exchanging_sglang(name, folder, mode, *_ROOM, tp=self.tp(model), page_tokens=self.page_tokens)

    def plain(self, model: TrainedModel) -> Command:
        """A server of the same engine that works alone."""
        name, folder = f"{model.name}-{self.engine}-plain", model.folder()
        if self.engine == "transformers":
            return transformers(name, folder)
        return vllm(name, folder) if self.engine == "vllm" else sglang(name, folder, *_ROOM)

    def named(self, model: TrainedModel) -> str:
        return f"{_NAMES[self.engine]} TP{self.tp(model)}, {self.page_tokens} tokens a page"


PAIRS = [
    (Half("vllm", 0, 16), Half("vllm", 1, 64)),
    (Half("vllm", 1, 64), Half("vllm", 0, 16)),
    (Half("sglang", 0, 16), Half("sglang", 1, 64)),
    (Half("sglang", 1, 64), Half("sglang", 0, 16)),
    (Half("sglang", 0, 64), Half("vllm", 1, 16)),
    (Half("vllm", 1, 16), Half("sglang", 0, 64)),
    (Half("transformers", 1, 16), Half("transformers", 1, 64)),
    (Half("transformers", 1, 64), Half("vllm", 0, 16)),
    (Half("sglang", 0, 64), Half("transformers", 1, 16)),
]


@pytest.fixture
def trained() -> TrainedModel:
    return TRAINED[os.environ["MODEL"]]


@pytest.fixture
def living(servers: Servers) -> Iterator[Servers]:
    """The servers of one pair: the next needs their memory."""
    yield servers
    for server in list(servers.running):
        server.kill()
        servers.running.remove(server)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda half: f"{half.engine}-{half.ranks or 'split'}")
def test_answers_in_english_are_a_plain_servers(
    first: Half, second: Half, trained: TrainedModel, living: Servers, results: Results
) -> None:
    if not {first.engine, second.engine} - {"transformers"} <= set(os.environ["KVMOVER_LIVE"].split()):
        pytest.skip(f'`make live MODEL={trained.name} ENGINE="{first.engine} {second.engine}"` runs this pair')
    plain, prefill, decode = living.start(
        second.plain(trained), first.command(trained, PREFILL), second.command(trained, DECODE)
    )
    prompts = trained.prompts()
    wanted = many(lambda prompt: ask(plain, prompt), prompts, _AT_ONCE)
    with routed(prefill, decode) as router:
        got = many(lambda prompt: ask(router, prompt), prompts, _AT_ONCE)
    moved_bytes = received_bytes(decode, second.engine, second.tp(trained))
    engine = second.engine if first.engine == second.engine else f"{first.engine}-{second.engine}"
    said = f"{moved_bytes / 1e6:.1f} MB moved"
    names = {"prefill": first.named(trained), "decode": second.named(trained)}
    verdict = results.add(engine, f"{trained.name}, {names['prefill']} to {names['decode']}", wanted, got, said)
    keep(
        trained.name,
        names,
        {
            "requests": verdict.requests,
            "same": verdict.same,
            "wrong": len(verdict.wrong),
            "failed": len(verdict.failed),
            "logprob_gap": float(f"{verdict.gap:.1e}"),
            "prompt_tokens": sum(map(len, prompts)),
            "moved_bytes": int(moved_bytes),
            "p50_ms": round(median(answer.seconds for answer in got) * 1e3),
        },
    )
    assert verdict.same == len(prompts), verdict.failed
    # Prompts begin alike: what a decode has of them does not move again.
    assert moved_bytes > trained.token_bytes * sum(map(len, prompts)) / 2


def keep(model: str, names: Mapping[str, str], row: Mapping[str, object]) -> None:
    """Write a row into live_models.csv."""
    record.replace("live_models", [{"model": model, **names, **row}], ("model", "prefill", "decode"))
