"""SGLang with kvmover's prefix tree as its radix cache, beside SGLang with its own: the same requests to both."""

from __future__ import annotations

import random

import pytest

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port
from tests.live.sglang_client import ask, split, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results

#: Room for six prompts of the longest, of 24 conversations, so that both caches must choose; and long prompts come in
#: chunks.
_LITTLE = ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")


def conversations(count: int, seed: int) -> list[list[int]]:
    """Prompts of 24 conversations with two system prompts, each a turn longer than the last one."""
    chance = random.Random(seed)
    systems = [[chance.randrange(256) for _ in range(200)] for _ in range(2)]
    turns = [list(systems[number % 2]) for number in range(24)]
    prompts = list[list[int]]()
    for _ in range(count):
        number = chance.randrange(len(turns))
        turns[number] += [chance.randrange(256) for _ in range(chance.randint(10, 90))]
        prompts.append(list(turns[number]))
        if len(turns[number]) > 600:
            turns[number] = list(systems[number % 2])
    return prompts


def told(server: Server, source: str) -> float:
    """Prompt tokens of this source, as the ledger says at /metrics."""
    text = server.get("/metrics", int(server.command.environment["KVMOVER_METRICS_PORT"]))[1]
    lines = [line for line in text.splitlines() if f'source="{source}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_200_requests_get_the_same_tokens_and_at_least_as_many_hits(
    kind: str, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model(kind, "sglang")
    own, ours = servers.start(
        sglang(f"sglang-own-cache-{kind}", weights, *_LITTLE),
        sglang(
            f"sglang-kvmover-cache-{kind}",
            weights,
            *(*_LITTLE, "--radix-cache-backend", "kvmover"),
            environment={"KVMOVER_METRICS_PORT": str(free_port())},
        ),
    )
    warm(own, ours)
    prompts = conversations(200, seed=91)
    before = {source: told(ours, source) for source in ("device", "computed")}
    wanted = [ask(own, prompt, 4) for prompt in prompts]
    got = [ask(ours, prompt, 4) for prompt in prompts]
    hits = [sum(answer.cached_tokens for answer in answers) for answers in (wanted, got)]
    verdict = results.add(
        "sglang",
        f"kvmover as the radix cache, {kind}",
        wanted,
        got,
        f"cached tokens {hits[1]:,}, SGLang's own {hits[0]:,}",
    )
    assert not verdict.failed
    assert hits[1] >= hits[0] > 20_000
    assert usage(ours) == 0
    assert told(ours, "device") - before["device"] == hits[1]
    assert told(ours, "computed") - before["computed"] == sum(map(len, prompts)) - hits[1]

    at_once = conversations(60, seed=92)
    wanted, got = (many(lambda prompt, server=server: ask(server, prompt, 4), at_once) for server in (own, ours))
    assert not results.add("sglang", f"kvmover as the radix cache, {kind}, 8 at once", wanted, got).failed
    assert usage(ours) == 0
    servers.stop([own, ours])


def test_prefill_and_decode_keep_prefixes_in_it(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, ours = model("llama", "sglang"), ("--radix-cache-backend", "kvmover")
    first, second = servers.start(
        sglang("sglang-radix-prefill", weights, *ours, "--chunked-prefill-size", "256", mode=PREFILL),
        sglang("sglang-radix-decode", weights, *ours, mode=DECODE_WITH_PREFIXES),
    )
    warm(plain.ready())
    prompts = conversations(40, seed=93)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: split(first, second, prompt), prompts)
    verdict = results.add("sglang", "kvmover as the radix cache of prefill and decode", wanted, got)
    assert not verdict.failed
    assert usage(first) == usage(second) == 0
