"""Images under one text, prefilled and decoded by vLLM: each gets its own KV, and none the KV of another image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.live.answers import Answer, post
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import mistake, sentence
from tests.live.pictures import TEXT, picture
from tests.live.server import Server, taking_images
from tests.live.table import Results
from tests.live.vllm_client import FOR_ANOTHER, usage, warm
from tests.live.vllm_forms import CHAT, Form, ask_choices, split_choices
from tests.live.vllm_servers import kvmover, vllm


@dataclass(frozen=True, slots=True)
class Trio:
    plain: Server
    first: Server
    second: Server


@pytest.fixture(scope="module")
def trio(servers: Servers, model: ModelMaker) -> Trio:
    weights = model("images", "vllm")
    started = servers.start(
        taking_images(vllm("vllm-images-plain", weights)),
        taking_images(vllm("vllm-images-prefill", weights, kv=kvmover())),
        taking_images(vllm("vllm-images-decode", weights, kv=kvmover(policy="fail"), block_tokens=32)),
    )
    warm(*started)
    return Trio(*started)


def asked(seed: int) -> Form:
    parts = [{"type": "image_url", "image_url": {"url": picture(seed)}}, {"type": "text", "text": TEXT}]
    return Form(f"image {seed}", {"messages": [{"role": "user", "content": parts}]}, path=CHAT)


def alone(server: Server, forms: Sequence[Form]) -> list[Answer]:
    return [answer for form in forms for answer in ask_choices(server, form)]


def test_every_image_has_its_own_kv_and_no_request_is_refused(trio: Trio, results: Results) -> None:
    """The second time decode has the KV, or what was made of it has left its cache of images."""
    forms = [asked(seed) for seed in range(8)] * 2
    wanted = alone(trio.plain, forms)
    assert len({answer.tokens for answer in wanted}) == 8
    got = [answer for form in forms for answer in split_choices(trio.first, trio.second, form)]
    assert not results.add("vllm", "images under one text", wanted, got).failed
    moved = trio.second.metrics("vllm:kvmover_received_requests", "vllm:kvmover_received_failures")
    assert moved["vllm:kvmover_received_requests_total"] >= 8
    assert moved["vllm:kvmover_received_failures_total"] == 0
    assert usage(trio.first) == usage(trio.second) == 0


def test_an_image_for_another_is_computed(trio: Trio, results: Results) -> None:
    pairs = [(asked(seed), asked(seed + 1)) for seed in range(20, 36, 2)]
    others = [other for _, other in pairs]
    got = list[Answer]()
    for one, other in pairs:
        half = post(f"{trio.first.url}{CHAT}", {**one.body, "max_tokens": 1, "kv_transfer_params": FOR_ANOTHER})
        got += ask_choices(trio.second, other, half.body["kv_transfer_params"])
    refused = mistake(
        results,
        "vllm",
        "KV of another image under the same text",
        alone(trio.plain, others),
        got,
        lambda: alone(trio.second, others),
        sentence(trio.second, "were asked for"),
    )
    assert refused == 0
