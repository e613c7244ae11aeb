"""A fetch is answered once: with what its source brought, or why nothing came, and by the end of its request."""

from __future__ import annotations

from typing import Any

import pytest

from kvmover.cache.hints import HintAction, HintAnswer, HintMet, HintRefusal, HintRefused
from kvmover.cache.peers import PeerMiss
from kvmover.engines.common import HINTS_KEYS, HintedRequests, outcome_of


def dynamo(source: str = "tcp://10.0.0.7:8400", name: str = "f") -> dict[str, Any]:
    payload = {"source_control_endpoint": source, "block_hashes": [1], "mode": "copy"}
    fetch = {"action_id": name, "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [fetch]}


LLM_D = {"remote_kv_source": {"kv_request_id": "q", "remote_host": "10.0.0.8", "remote_port": 8400}}


class Desk(HintedRequests[str]):
    def __init__(self, fetches: bool = True) -> None:
        self.told: list[tuple[str, str, str]] = []
        super().__init__(self.refuse, self.tell, lambda: fetches)

    def refuse(self, request: str, action: HintAction) -> HintAnswer:
        return HintRefused(HintRefusal.ABSENT, "")

    def tell(self, request: str, kind: str, answer: HintAnswer) -> None:
        self.told.append((request, kind, outcome_of(answer)))


@pytest.mark.parametrize(
    ("envelope", "params", "source"),
    [
        (dynamo(), None, "10.0.0.7:8400"),
        (dynamo("tcp://[FD00:0::7]:8400"), {}, "[fd00::7]:8400"),
        *((None, {key: dynamo("Chat-0:1")}, "chat-0:1") for key in HINTS_KEYS),
        (None, LLM_D, "10.0.0.8:8400"),
    ],
    ids=["an envelope", "IPv6", *HINTS_KEYS, "llm-d"],
)
def test_a_source_is_known_as_soon_as_the_request_came_and_until_it_is_answered(envelope, params, source) -> None:
    desk = Desk()
    desk.came("r", "R", envelope, params)
    assert (desk.source("r"), desk.source("s"), desk.told) == (source, None, [])
    desk.brought("r", 320)
    desk.brought("r", PeerMiss.READ_FAILED)
    desk.ended("r", "R")
    assert (desk.source("r"), desk.told) == (None, [("R", "fetch", "met")])


@pytest.mark.parametrize("miss", PeerMiss)
def test_every_reason_for_which_nothing_came_is_an_answer_of_its_own(miss: PeerMiss) -> None:
    desk = Desk()
    desk.came("r", "R", dynamo(), None)
    desk.brought("r", miss)
    assert desk.told == [("R", "fetch", miss.value)]


def test_a_fetch_that_nobody_looked_for_is_answered_as_its_request_ends() -> None:
    desk = Desk()
    desk.came("r", "R", dynamo(), None)
    desk.came("s", "S", None, LLM_D)
    desk.ended("r", "R")
    desk.aborted("s", "S")
    assert desk.told == [("R", "fetch", "needless"), ("S", "fetch", "aborted")]
    assert [name for name in "rs" if name in desk or desk.source(name)] == []


def test_a_request_has_one_source_and_where_no_peers_are_none() -> None:
    desk, alone = Desk(), Desk(fetches=False)
    for each in (desk, alone):
        each.came("r", "R", dynamo(), LLM_D)
    assert (desk.source("r"), desk.told) == ("10.0.0.7:8400", [("R", "fetch", "busy")])
    assert (alone.source("r"), alone.told) == (None, [("R", "fetch", "no_peers")] * 2)


def test_an_answer_names_the_source(caplog) -> None:
    caplog.set_level("INFO", "kvmover")
    desk = Desk()
    desk.came("r", "R", dynamo(), None)
    desk.brought("r", PeerMiss.NOT_ALLOWED)
    assert "10.0.0.7:8400" in caplog.text
    assert "exchange.allow" in caplog.text
    assert outcome_of(HintMet(16)) == "met"
