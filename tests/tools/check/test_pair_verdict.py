"""The verdict on a pair follows from what was seen of it: each fault is named with its half."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvmover.engines.common import EngineMake
from kvmover.errors import PeerRefused
from kvmover.layout import Component
from kvmover.tools.check.pair_seen import Counted, EngineAnswer, Half, PairSeen, PromptAsked, Ranks, ServerSeen
from kvmover.tools.check.pair_verdict import CheckOutcome, CheckVerdict, fault_of_servers, verdict
from kvmover.transfer.protocol.auth import Key, Keys, MessageAuth, NoAuth
from kvmover.transfer.protocol.handshake import Card, Model, read_card, why_refused
from kvmover.transfer.protocol.wire import CURRENT

VLLM = ServerSeen("http://v:8100", make=EngineMake.VLLM, model="m", mover="kvmover", prompt=(1, 2, 3))
PREFILL = ServerSeen(
    "http://p:30000", make=EngineMake.SGLANG, model="m", mover="kvmover", mode="prefill", bootstrap_port=8998
)
DECODE = replace(PREFILL, url="http://d:30001", mode="decode")

OFFERED = {"kvmover_content": "3:00", "remote_host": "v", "remote_port": 14600}
TOKENS = tuple(range(10, 26))
CAME = Counted(980 << 10, routes={"packed": 3}, sources=2)
GOOD = PromptAsked(EngineAnswer(tokens=(10,), params=OFFERED), EngineAnswer(tokens=TOKENS), CAME)


def pair(
    prefill: ServerSeen = VLLM, decode: ServerSeen = VLLM, asked: PromptAsked | None = GOOD, **more: Any
) -> PairSeen:
    return PairSeen(prefill, decode, **{"ranks": Ranks("v:14600"), "asked": asked, **more})


def failing(error: str = "", **counted: Any) -> PromptAsked:
    """A prompt whose KV did not come."""
    return replace(GOOD, second=EngineAnswer(error, () if error else TOKENS), counted=Counted(sources=1, **counted))


def said(found: CheckVerdict) -> tuple[CheckOutcome, Half | None]:
    return found.outcome, found.half


def test_kv_that_came_is_told_in_bytes_route_and_tokens() -> None:
    found = verdict(pair(asked=replace(GOOD, alone=EngineAnswer(tokens=TOKENS), by="the prefill alone")))
    assert said(found) == (CheckOutcome.MOVED, None)
    assert found.outcome.status == 0
    assert found.sentence == (
        "KV came over kvmover, 980 KiB, route packed, tokens equal: 16 of 16 are those of the prefill alone"
    )
    assert (found.received_bytes, found.route, found.equal_tokens, found.compared_tokens) == (
        980 << 10,
        "packed",
        16,
        16,
    )


def test_a_route_that_no_endpoint_counts_is_told_to_be_unknown() -> None:
    found = verdict(pair(asked=replace(GOOD, counted=replace(CAME, routes={}))))
    assert "by a route that --metrics of the prefill tells" in found.sentence
    assert "tokens were not compared" in found.sentence


@pytest.mark.parametrize(
    ("lead", "outcome", "status"), [(0.01, "moved", 0), (3.0, "other_tokens", 3), (None, "other_tokens", 3)]
)
def test_a_token_that_differs_is_a_fault_unless_it_was_a_near_tie(
    lead: float | None, outcome: str, status: int
) -> None:
    other = (*TOKENS[:4], 99, *TOKENS[5:])
    alone = EngineAnswer(tokens=other, leads=(5.0, 5.0, 5.0, 5.0, lead, 5.0))
    found = verdict(pair(asked=replace(GOOD, alone=alone, by="the prefill alone")))
    assert (found.outcome, found.outcome.status, found.equal_tokens) == (outcome, status, 4)
    assert "token 5 of 16 is not that of the prefill alone" in found.sentence
    assert ("near tie" in found.sentence) == (status == 0)


@pytest.mark.parametrize(
    ("seen", "outcome", "half", "words"),
    [
        (pair(replace(VLLM, error="refused")), "server_down", "prefill", "prefill does not answer: refused"),
        (pair(decode=replace(VLLM, error="refused")), "server_down", "decode", "decode does not answer"),
        (pair(decode=ServerSeen("http://r:8000")), "no_engine", "decode", "http://r:8000 answers, and is neither"),
        (pair(replace(VLLM, mover="")), "no_connector", "prefill", "KvmoverConnector in --kv-transfer-config"),
        (pair(decode=replace(VLLM, mover="")), "no_connector", "decode", "KvmoverConnector in --kv-transfer-config"),
        (pair(replace(PREFILL, mover="nixl"), DECODE), "no_connector", "prefill", "moves KV by nixl"),
        (pair(DECODE, PREFILL), "wrong_role", "prefill", "with --disaggregation-mode decode"),
        (pair(PREFILL, replace(DECODE, mode="")), "wrong_role", "decode", "without --disaggregation-mode"),
        (pair(decode=replace(VLLM, prompt=(1, 9, 3))), "other_tokenizer", "both", "unequal from token 1 on"),
        (pair(decode=replace(VLLM, prompt=(1, 2))), "other_tokenizer", "both", "unequal in their number"),
    ],
)
def test_a_fault_that_the_servers_tell_is_found_before_anything_is_asked(
    seen: PairSeen, outcome: str, half: str, words: str
) -> None:
    found = fault_of_servers(replace(seen, asked=None))
    assert found is not None
    assert said(found) == (outcome, half)
    assert found == verdict(seen)
    assert words in found.sentence
    assert found.outcome.status == 1


def test_two_servers_that_tell_no_fault_are_open() -> None:
    assert fault_of_servers(pair(asked=None)) is None
    assert fault_of_servers(pair(PREFILL, DECODE, None)) is None
    assert fault_of_servers(pair(replace(VLLM, mover=None, prompt=()), DECODE, None)) is None


OTHER_WEIGHTS = "peer holds weights a of m; this side holds weights b of m; they differ in weights"


@pytest.mark.parametrize(
    ("seen", "outcome", "half", "words"),
    [
        (pair(asked=replace(failing(), first=EngineAnswer(tokens=(1,)))), "wrong_role", "prefill", "kv_consumer"),
        (
            pair(replace(VLLM, mover=None), asked=replace(failing(), first=EngineAnswer(tokens=(1,)))),
            "wrong_role",
            "prefill",
            "or it has no KvmoverConnector",
        ),
        (
            pair(replace(VLLM, mover=None), asked=replace(failing(), first=EngineAnswer(params={"remote_host": "v"}))),
            "no_connector",
            "prefill",
            "by another connector",
        ),
        (pair(asked=failing(failures=1), unlike=OTHER_WEIGHTS), "refused", "both", OTHER_WEIGHTS),
        (pair(PREFILL, DECODE, failing(OTHER_WEIGHTS)), "refused", "both", OTHER_WEIGHTS),
        (pair(asked=failing(mistaken=1)), "refused", "both", "as that of another prompt"),
        (pair(asked=failing(failures=1, refused={"handshake": 2})), "refused", "both", "compare the keys"),
        (pair(asked=failing(failures=1), ranks=Ranks("v:1", "refused")), "unreachable", "prefill", "from here as"),
        (
            pair(asked=failing(failures=1, ends={"unbegun": 1})),
            "unreachable",
            "decode",
            "does not reach the prefill's ranks at v:14600, which this machine does",
        ),
        (pair(asked=failing(failures=1, ends={"deadline": 1})), "transfer_failed", "both", "(deadline)"),
        (pair(PREFILL, DECODE, failing("out of memory")), "request_failed", "decode", "out of memory"),
        (
            pair(asked=PromptAsked(EngineAnswer("no model m"), EngineAnswer(), Counted(sources=1))),
            "request_failed",
            "prefill",
            "no model m",
        ),
        (pair(asked=failing()), "recomputed", "decode", "kv_producer"),
        (pair(PREFILL, DECODE, replace(GOOD, counted=Counted())), "metrics_off", "decode", "KVMOVER_METRICS_PORT"),
        (
            pair(PREFILL, DECODE, replace(GOOD, counted=Counted(errors=("cannot read x",)))),
            "metrics_off",
            "decode",
            "cannot read x",
        ),
    ],
)
def test_kv_that_did_not_come_has_a_half_that_is_at_fault(seen: PairSeen, outcome: str, half: str, words: str) -> None:
    found = verdict(seen)
    assert said(found) == (outcome, half), found
    assert words in found.sentence
    assert found.outcome.status == (4 if outcome == "metrics_off" else 1)


def test_bytes_beside_a_failure_are_no_success() -> None:
    counted = replace(CAME, failures=1, ends={"deadline": 1})
    assert verdict(pair(asked=replace(GOOD, counted=counted))).outcome is CheckOutcome.TRANSFER_FAILED


def test_a_router_is_at_fault_only_where_the_pair_is_good() -> None:
    found = verdict(pair(routed=failing()))
    assert said(found) == (CheckOutcome.RECOMPUTED, Half.ROUTER)
    assert "through the router decode computed the prompt itself" in found.sentence
    assert verdict(pair(routed=GOOD)).outcome is CheckOutcome.MOVED
    assert verdict(pair(asked=failing(), routed=failing("502"))).half is Half.DECODE


def model(layers: int = 4, weights: str = "a") -> Model:
    return Model("m", (Component.attention(layers, 4, 64, "bfloat16"),), weights)


def card(of: Model, speaks: tuple[int, int] = (1, 1)) -> bytes:
    return msgspec.msgpack.encode(Card(speaks, of.fields(), of.text(), b""))


def test_cards_refuse_each_other_in_the_words_of_a_rank() -> None:
    """What a check reads from two cards is what a rank with this model would have raised."""
    own, theirs = model(), model(6, "b")
    with pytest.raises(PeerRefused) as refused:
        read_card(own, card(theirs, CURRENT.speaks))
    assert why_refused(card(own), card(theirs)) == str(refused.value)
    assert "they differ in weights, attention.layers" in str(refused.value)
    assert why_refused(card(own), card(model())) is None
    told = why_refused(card(own, (3, 4)), card(own, (1, 2)))
    assert told == "peer speaks protocol versions 1 to 2; this side speaks 3 to 4"


def test_a_seal_of_one_half_alone_is_told_and_two_seals_are_looked_behind() -> None:
    auth = MessageAuth(Keys(Key(bytes(range(32)))), "x")
    sealed, bare = auth.sign_card(card(model())), card(model())
    assert why_refused(sealed, bare) == "this side's card is sealed with a shared key, and the peer's is not"
    assert why_refused(bare, sealed) == "the peer's card is sealed with a shared key, and this side's is not"
    assert why_refused(sealed, auth.sign_card(card(model()))) is None
    assert "they differ in weights" in (why_refused(sealed, auth.sign_card(card(model(4, "b")))) or "")


def sentences() -> list[str]:
    """What ranks say as they turn a peer away."""
    auth = MessageAuth(Keys(Key(bytes(range(32)))), "x")
    other = MessageAuth(Keys(Key(bytes(range(1, 33)))), "x")
    calls = [
        lambda: read_card(model(), card(model(6))),
        lambda: read_card(model(), card(model(), (90, 99))),
        lambda: read_card(model(), b"?"),
        lambda: NoAuth().verify_card(auth.sign_card(b"card")),
        lambda: auth.verify_card(b"card"),
        lambda: auth.verify_card(other.sign_card(b"card")),
    ]
    found: list[str] = []
    for call in calls:
        with pytest.raises(PeerRefused) as refused:
            call()
        found.append(str(refused.value))
    return found


@pytest.mark.parametrize("sentence", sentences())
def test_a_refusal_in_an_engines_answer_is_known_by_its_sentence(sentence: str) -> None:
    found = verdict(pair(PREFILL, DECODE, failing(sentence)))
    assert said(found) == (CheckOutcome.REFUSED, Half.BOTH)
    assert sentence in found.sentence
