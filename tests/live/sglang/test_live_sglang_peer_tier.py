"""SGLang fleets of unlike shape share what they have on their hosts: what one has computed the other reads from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Command, Server, free_port
from tests.live.sglang.test_live_sglang_radix import conversations, told
from tests.live.sglang_client import ask, counted, usage, warm
from tests.live.sglang_servers import hicache, sglang
from tests.live.table import Results

_TIERS = ("device", "host", "storage", "peer", "computed")

#: Instead of the root of a page store.
_NO_STORE = Path("none")


def addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


def sharing(name: str, model: Path, own: str, engines: Sequence[str], *more: str, **shape: int) -> Command:
    """A server that lends what it has on its host, and asks the others of `engines`; there is no page store."""
    tiers = hicache(_NO_STORE, "page_first_direct")
    environment = {
        "KVMOVER_METRICS_PORT": str(free_port()),
        "KVMOVER_PEERS_ADDRESS": own,
        "KVMOVER_PEERS_ENGINES": ",".join(engines),
        # Two cores for all servers: an answer may take its time.
        "KVMOVER_PEERS_ASK_S": "5",
    }
    return sglang(name, model, "--radix-cache-backend", "kvmover", *tiers, *more, environment=environment, **shape)


def hits(server: Server) -> dict[str, float]:
    return {source: told(server, source) for source in _TIERS}


def lendable(server: Server, prompts: Sequence[Sequence[int]]) -> None:
    """Wait until a server lends all whole pages of these."""
    page = page_tokens(server)
    count = len({tuple(prompt[:end]) for prompt in prompts for end in range(page, len(prompt), page)})
    stop = time.monotonic() + 60
    while (lends := counted(server, "kvmover_tier_lendable_pages")) < count:
        assert time.monotonic() < stop, f"{server.name} lends {lends} pages, and not {count}"
        time.sleep(0.2)


def page_tokens(server: Server) -> int:
    return int(server.command.arguments[server.command.arguments.index("--page-size") + 1])


def lent(prompts: Sequence[Sequence[int]], lender: Server, borrower: Server) -> int:
    """Tokens of prompts that come from a peer which has all of them, where each was served before the next."""
    has, asks = page_tokens(lender), page_tokens(borrower)
    known, found = set[tuple[int, ...]](), 0
    for prompt in prompts:
        ends = range(asks, len(prompt), asks)
        own = max((end for end in ends if tuple(prompt[:end]) in known), default=0)
        found += max(0, (len(prompt) - 1) // has * has // asks * asks - own)
        known |= {tuple(prompt[:end]) for end in range(asks, len(prompt) + 1, asks)}
    return found


class Sharing:
    """What two servers answer beside a plain one, and from where the second has what it did not compute."""

    def __init__(self, plain: Server, results: Results) -> None:
        self.plain, self.results = plain, results

    def one_by_one(self, title: str, lender: Server, borrower: Server, prompts: Sequence[list[int]]) -> None:
        """Every page that is no other request's is read once from the lender, and no whole page is computed."""
        wanted = [ask(self.plain, prompt, 4) for prompt in prompts]
        alone = [ask(lender, prompt, 4) for prompt in prompts]
        assert not self.results.add("sglang", f"host memory of peers, {title}, the lender", wanted, alone).failed
        lendable(lender, prompts)
        before = hits(borrower)
        got = [ask(borrower, prompt, 4) for prompt in prompts]
        found = self.judge(f"host memory of peers, {title}", before, borrower, prompts, wanted, got)
        due = lent(prompts, lender, borrower)
        assert found["peer"] == due > 5_000
        assert found["computed"] <= max(page_tokens(lender), page_tokens(borrower)) * len(prompts)

    def judge(
        self,
        title: str,
        before: dict[str, float],
        server: Server,
        prompts: Sequence[list[int]],
        wanted: Sequence[Answer],
        got: Sequence[Answer],
    ) -> dict[str, float]:
        """Tokens by where they came from, which are those of the prompts, and the same answers."""
        found = {source: tokens - before[source] for source, tokens in hits(server).items()}
        said = ", ".join(f"{tokens:,.0f} {source}" for source, tokens in found.items() if tokens)
        assert not self.results.add("sglang", title, wanted, got, said).failed
        assert not counted(server, "kvmover_ledger_faults_total")
        assert sum(found.values()) == sum(map(len, prompts))
        assert not found["storage"]  # there is none
        assert usage(server) == 0
        return found


def test_what_one_fleet_has_computed_another_of_unlike_shape_finds_there_and_a_peer_that_dies_costs_a_miss(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    """TP2 in pages of 16 computes, TP1 in pages of 64 reads; the other way; one is stopped, and goes on; is killed."""
    weights, names = model("llama", "sglang"), addresses(2)
    first, second = servers.start(
        sharing("sglang-peer-tp2-16", weights, names[0], names, tp=2, page_tokens=16),
        sharing("sglang-peer-tp1-64", weights, names[1], names, page_tokens=64),
    )
    warm(plain.ready(), first, second)
    pair = Sharing(plain, results)
    prompts = [
        [*conversations(20, seed), *prompts_of(12, seed + 10, least_tokens=300, most_tokens=900)]
        for seed in range(191, 195)
    ]
    pair.one_by_one("TP2 in pages of 16 to TP1 in pages of 64", first, second, prompts[0])
    pair.one_by_one("TP1 in pages of 64 to TP2 in pages of 16", second, first, prompts[1])

    wanted = [ask(plain, prompt, 4) for prompt in prompts[2]]
    before = hits(second)
    first.pause()
    got = many(lambda prompt: ask(second, prompt, 4), prompts[2])
    first.resume()
    found = pair.judge("host memory of a peer that is stopped", before, second, prompts[2], wanted, got)
    assert found["peer"] == 0
    reads_again(first, second)

    wanted = [ask(plain, prompt, 4) for prompt in prompts[3]]
    many(lambda prompt: ask(first, prompt, 4), prompts[3])
    lendable(first, prompts[3])
    before, borrowed = hits(second), counted(second, "kvmover_tier_borrowed_pages_total")
    answers = list[Answer]()
    asking = Thread(target=lambda: answers.extend(many(lambda prompt: ask(second, prompt, 4), prompts[3])))
    asking.start()
    while counted(second, "kvmover_tier_borrowed_pages_total") < borrowed + 4:
        time.sleep(0.01)
    first.kill()
    asking.join()
    found = pair.judge("host memory of a peer that is killed as it lends", before, second, prompts[3], wanted, answers)
    assert found["peer"] >= 4 * 64
    servers.stop([second])


def reads_again(lender: Server, borrower: Server) -> None:
    """Within a minute of when the lender goes on, what it has is found there."""
    stop = time.monotonic() + 60
    for (prompt,) in (prompts_of(1, seed, least_tokens=300, most_tokens=300) for seed in range(1_000, 2_000)):
        known = told(borrower, "peer")
        assert ask(lender, prompt, 4).ok
        lendable(lender, [prompt])
        assert ask(borrower, prompt, 4).ok
        if told(borrower, "peer") > known:
            return
        assert time.monotonic() < stop
        time.sleep(1.0)


@pytest.mark.parametrize(
    ("kind", "lender", "borrower"),
    [
        ("latent-yarn", {"tp": 2, "page_tokens": 16}, {"page_tokens": 64}),
        ("llama", {"pp": 2, "page_tokens": 32}, {"tp": 2, "page_tokens": 16}),
    ],
    ids=["a latent", "pipeline stages"],
)
def test_latents_and_stages_of_a_pipeline_are_shared_too(
    kind: str, lender: dict[str, int], borrower: dict[str, int], servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, names = model(kind, "sglang"), addresses(2)
    plain, first, second = servers.start(
        sglang(f"sglang-peer-plain-{kind}", weights),
        sharing(f"sglang-peer-lends-{kind}", weights, names[0], names, **lender),
        sharing(f"sglang-peer-borrows-{kind}", weights, names[1], names, **borrower),
    )
    warm(plain, first, second)
    prompts = prompts_of(16, seed=195, least_tokens=300, most_tokens=900)
    Sharing(plain, results).one_by_one(f"{kind}, {grid(lender)} to {grid(borrower)}", first, second, prompts)
    servers.stop([plain, first, second])


def test_two_fleets_with_little_memory_read_from_each_other_while_both_evict(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    """The same conversations, eight requests at once at each of two servers whose hosts hold a third of them."""
    weights, names = model("llama", "sglang"), addresses(2)
    little = ("--max-total-tokens", "2048", "--chunked-prefill-size", "256")
    both = servers.start(
        sharing("sglang-peer-little-tp2-16", weights, names[0], names, *little, tp=2, page_tokens=16),
        sharing("sglang-peer-little-tp1-32", weights, names[1], names, *little, page_tokens=32),
    )
    warm(plain.ready(), *both)
    prompts = conversations(120, seed=196)
    wanted = [ask(plain, prompt, 4) for prompt in prompts]
    before = [hits(server) for server in both]
    turned = [prompts, [*prompts[60:], *prompts[:60]]]
    got: list[list[Answer]] = [[], []]

    def serve(number: int) -> None:
        got[number] = many(lambda prompt: ask(both[number], prompt, 4), turned[number])

    asking = [Thread(target=serve, args=(number,)) for number in range(2)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    pair = Sharing(plain, results)
    for number, server in enumerate(both):
        due = wanted if not number else [*wanted[60:], *wanted[:60]]
        title = f"host memory of peers, little of it, 8 at once, {('TP2', 'TP1')[number]}"
        found = pair.judge(title, before[number], server, prompts, due, got[number])
        assert found["peer"] >= 8 * 32  # how much is found depends on who evicts first
        assert not counted(server, "kvmover_ledger_faults_total")
    servers.stop(both)


def grid(shape: dict[str, int]) -> str:
    return f"TP{shape.get('tp', 1)} PP{shape.get('pp', 1)} in pages of {shape['page_tokens']}"
