"""Long prompts that are prefilled in chunks: the time to the first token, where each chunk is sent as it is computed,
and where all are sent with the last, as kvmover did before."""

from __future__ import annotations

import pytest

from perf.before import tree_of
from tests.live.beside import Load, Machine, Way, measure
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask_streamed, split_streamed, tokens_of, warm
from tests.live.sglang_servers import DECODE, PREFILL, of_tree, sglang

#: The last commit at which a request was sent when its last chunk had been computed.
_BEFORE = "3118932"
_CHUNKED = ("--chunked-prefill-size", "256")


@pytest.mark.alone
def test_times_of_long_prompts_in_chunks(plain: Server, servers: Servers, model: ModelMaker) -> None:
    weights, tokens = model("llama", "sglang"), 8
    with tree_of(_BEFORE) as before:
        first, second, whole_first, whole_second = servers.start(
            sglang("sglang-growth-prefill", weights, *_CHUNKED, mode=PREFILL),
            sglang("sglang-growth-decode", weights, mode=DECODE),
            of_tree(sglang("sglang-whole-prefill", weights, *_CHUNKED, mode=PREFILL), before),
            of_tree(sglang("sglang-whole-decode", weights, mode=DECODE), before),
        )
        warm(plain.ready())
        ways = {
            "long prompts, plain": Way([plain], lambda prompt: ask_streamed(plain, prompt, tokens), tokens_of),
            "long prompts in chunks of 256, as computed": Way(
                [first, second], lambda prompt: split_streamed(first, second, prompt, tokens), tokens_of
            ),
            "long prompts in chunks of 256, with the last": Way(
                [whole_first, whole_second],
                lambda prompt: split_streamed(whole_first, whole_second, prompt, tokens),
                tokens_of,
            ),
        }
        measure("sglang", Machine.TOGETHER, ways, [Load(10, per_s=1)], (1900, 1900))
