"""Images under one text, prefilled and decoded by SGLang: each gets its own KV, and none the KV of another image."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import mistake, sentence
from tests.live.pictures import TEXT, picture
from tests.live.server import Server, taking_images
from tests.live.sglang_client import counted, generate, room_at, split_body, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results


@dataclass(frozen=True, slots=True)
class Trio:
    plain: Server
    first: Server
    second: Server


@pytest.fixture(scope="module")
def trio(servers: Servers, model: ModelMaker) -> Trio:
    weights = model("images", "sglang")
    started = servers.start(
        taking_images(sglang("sglang-images-plain", weights)),
        taking_images(sglang("sglang-images-prefill", weights, mode=PREFILL)),
        taking_images(sglang("sglang-images-decode", weights, mode=DECODE_WITH_PREFIXES, page_tokens=32)),
    )
    warm(started[0])
    return Trio(*started)


def asked(seed: int) -> Mapping[str, Any]:
    greedy = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    text = {
        "text": f"<|vision_start|><|image_pad|><|vision_end|>{TEXT}",
        "sampling_params": greedy,
        "return_logprob": True,
    }
    return {**text, "image_data": [picture(seed)]}


def test_every_image_has_its_own_kv_and_no_request_is_refused(trio: Trio, results: Results) -> None:
    """The second time decode has the KV."""
    bodies = [asked(seed) for seed in range(8)] * 2
    wanted = [answer for body in bodies for answer in generate(trio.plain, body)]
    assert len({answer.tokens for answer in wanted}) == 8
    got = [answer for body in bodies for answer in split_body(trio.first, trio.second, body)]
    moved = counted(trio.second, "kvmover_received_bytes_total")
    assert not results.add("sglang", "images under one text", wanted, got, f"{moved / 1e6:.1f} MB moved").failed
    assert moved > 0
    assert usage(trio.first) == usage(trio.second) == 0


def test_an_image_for_another_is_refused(trio: Trio, results: Results) -> None:
    pairs = [(asked(seed), asked(seed + 1)) for seed in range(20, 36, 2)]
    others = [other for _, other in pairs]
    wanted = [answer for other in others for answer in generate(trio.plain, other)]
    got = []
    for one, other in pairs:
        room = room_at(trio.first)
        with ThreadPoolExecutor(2) as pool:
            halves = [pool.submit(generate, *half, room) for half in ((trio.first, one), (trio.second, other))]
            got += [half.result() for half in halves][1]
    refused = mistake(
        results,
        "sglang",
        "KV of another image under the same text",
        wanted,
        got,
        lambda: [answer for other in others for answer in split_body(trio.first, trio.second, other)],
        sentence(trio.second, "the KV is of"),
    )
    assert refused == len(pairs)
