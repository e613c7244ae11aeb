"""An envelope as both engines write it is read action by action, and what makes no sense is refused by its values."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvmover.cache.hints import (
    Declined,
    DemoteHint,
    FetchHint,
    HintAction,
    HintError,
    HintRefusal,
    LeaseHint,
    PinHint,
    PrefetchHint,
    RetainHint,
    ShareHint,
    read_hints,
    read_source,
)
from kvmover.cache.hints.actions import SOURCE_KEYS


class KvHintAction(msgspec.Struct, frozen=True, kw_only=True):
    """As in both engines."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}


class KvHintsEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """As in both engines."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction] = []


def action(kind: str, payload: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload or {}, **more}


def envelope(*actions: object) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def one(kind: str, payload: dict[str, Any] | None = None, **more: Any) -> HintAction | Declined:
    (read,) = read_hints(envelope(action(kind, payload, **more)))
    return read


@pytest.mark.parametrize(
    ("kind", "payload", "hint", "is_due_at_once"),
    [
        ("kv.share", {}, ShareHint(), False),
        ("kv.prefetch", {}, PrefetchHint(), True),
        ("kv.prefetch", {"token_ids": [1, 2]}, PrefetchHint((1, 2)), True),
        ("kv.pin", {"ttl_seconds": 30}, PinHint(30.0), False),
        ("kv.pin", {"ttl_seconds": 0.5, "token_ids": [7]}, PinHint(0.5, (7,)), True),
        ("kv.retain", {"priority": 3}, RetainHint(3), False),
        ("kv.retain", {"priority": 3, "ttl_seconds": 2.5}, LeaseHint(2.5, priority=3), False),
        ("kv.demote", {}, DemoteHint(), False),
    ],
)
def test_each_action_is_read(kind: str, payload: dict[str, Any], hint: object, is_due_at_once: bool) -> None:
    read = one(kind, payload)
    assert isinstance(read, HintAction)
    assert (read.name, read.hint, read.is_due_at_once) == ("a", hint, is_due_at_once)
    assert f"kv.{read.kind}" == kind


def test_a_retain_of_dynamos_policies_keeps_the_requests_own_prefix_for_its_time() -> None:
    said = {
        "priority": 3,
        "ttl_seconds": 2.5,
        "execute_at": "request_completion",
        "include_current_request": True,
        "block_hashes": ["11", str(2**64 - 1)],
    }
    read = one("kv.retain", said)
    assert isinstance(read, HintAction)
    assert isinstance(read.hint, PinHint)
    assert (read.kind, read.hint.ttl_s, read.is_due_at_once) == ("retain", 2.5, False)


def test_the_engines_own_structs_are_read_as_their_json_is() -> None:
    said = envelope(action("kv.pin", {"ttl_seconds": 5}), action("kv.demote"))
    assert read_hints(msgspec.convert(said, KvHintsEnvelope)) == read_hints(said)


def test_one_that_is_refused_spoils_no_other() -> None:
    read = read_hints(envelope(action("kv.lease"), 7, action("kv.pin"), action("kv.demote")))
    assert [each.kind for each in read] == ["other", "other", "pin", "demote"]
    assert [each.answer.why for each in read if isinstance(each, Declined)] == [
        HintRefusal.UNKNOWN,
        HintRefusal.MALFORMED,
        HintRefusal.MALFORMED,
    ]


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        ("kv.pin", {}, "ttl_seconds"),
        ("kv.pin", {"ttl_seconds": -1}, "ttl_seconds"),
        ("kv.pin", {"ttl_seconds": "soon"}, "ttl_seconds"),
        ("kv.pin", {"ttl_seconds": float("nan")}, "ttl_seconds"),
        ("kv.pin", {"ttl_seconds": float("inf")}, "inf"),
        ("kv.pin", {"ttl_seconds": 1, "block_hashes": ["11"]}, "block_hashes"),
        ("kv.retain", {"priority": True}, "priority"),
        ("kv.retain", {"priority": -1}, "priority"),
        ("kv.retain", {"priority": 1, "ttl_seconds": 0}, "ttl_seconds must be more than 0"),
        ("kv.retain", {"priority": 1, "ttl_seconds": math.inf}, "ttl_seconds"),
        ("kv.retain", {"priority": -1, "ttl_seconds": 5}, "priority"),
        ("kv.retain", {"ttl_seconds": 5, "execute_at": "now"}, "execute_at"),
        ("kv.retain", {"ttl_seconds": 5, "include_current_request": False}, "include_current_request must be true"),
        ("kv.retain", {"ttl_seconds": 5, "scope": "s"}, "scope"),
        ("kv.share", {"token_ids": []}, "token_ids"),
        ("kv.share", {"token_ids": [1 << 32]}, "token_ids"),
    ],
)
def test_a_payload_that_makes_no_sense_is_refused_by_its_key(kind: str, payload: dict[str, Any], words: str) -> None:
    read = one(kind, payload)
    assert isinstance(read, Declined)
    assert read.answer.why is HintRefusal.MALFORMED
    assert words in read.answer.words


def test_later_minor_versions_are_read_and_other_major_ones_are_not() -> None:
    assert isinstance(one("kv.demote", action_version="1.7"), HintAction)
    read = one("kv.demote", action_version="2.0")
    assert isinstance(read, Declined)
    assert (read.kind, read.answer.why) == ("demote", HintRefusal.UNKNOWN)
    assert "2.0" in read.answer.words


@pytest.mark.parametrize("said", [7, "kv.pin", None, [], {"protocol_version": "0.1"}, {**envelope(), "actions": {}}])
def test_what_is_no_envelope_is_refused(said: object) -> None:
    with pytest.raises(HintError, match="an envelope of hints"):
        read_hints(said)


def test_too_many_actions_are_refused_before_any_is_read() -> None:
    with pytest.raises(HintError, match="17"):
        read_hints(envelope(*[action("kv.demote")] * 17))


FETCH = {"source_control_endpoint": "tcp://10.0.0.7:8400", "block_hashes": [2**64 - 1, 0], "mode": "copy"}


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.7:8400", "10.0.0.7:8400", "tcp://[2001:db8::1]:1", "tcp://worker-a:65535"]
)
def test_a_fetch_of_dynamo_names_its_source_and_is_due_at_once(endpoint: str) -> None:
    read = one("kv.fetch", FETCH | {"source_control_endpoint": endpoint})
    assert isinstance(read, HintAction)
    assert read.hint == FetchHint(endpoint.removeprefix("tcp://"))
    assert (read.kind, read.is_due_at_once) == ("fetch", True)


@pytest.mark.parametrize(
    "changed",
    [
        {"source_control_endpoint": None},
        {"source_control_endpoint": "http://10.0.0.7:8400/x"},
        {"source_control_endpoint": "tcp://10.0.0.7"},
        {"source_control_endpoint": "10.0.0.7:0"},
        {"source_control_endpoint": "10.0.0.7:70000"},
        {"source_control_endpoint": "a b:1"},
        {"block_hashes": []},
        {"block_hashes": [-1]},
        {"block_hashes": ["11"]},
        {"mode": "move"},
        {"no_retain": True},
    ],
    ids=str,
)
def test_a_fetch_that_says_something_else_is_malformed(changed: dict[str, Any]) -> None:
    read = one("kv.fetch", FETCH | changed)
    assert isinstance(read, Declined)
    assert (read.kind, read.answer.why) == ("fetch", HintRefusal.MALFORMED)


@pytest.mark.parametrize("key", SOURCE_KEYS)
@pytest.mark.parametrize(("host", "source"), [("10.0.0.7", "10.0.0.7:8400"), ("fd00::7", "[fd00::7]:8400")])
def test_a_source_in_the_words_of_llm_d_is_the_same_fetch(key: str, host: str, source: str) -> None:
    said = {"kv_request_id": "q-3", "remote_host": host, "remote_port": 8400}
    assert read_source({"do_remote_decode": True, key: said}) == HintAction("q-3", FetchHint(source))
    assert read_source({"do_remote_decode": True}) is None


@pytest.mark.parametrize(
    "said", [7, {}, {"kv_request_id": "q"}, {"kv_request_id": "q", "remote_host": "a/b", "remote_port": 1}], ids=str
)
def test_a_source_without_an_address_is_malformed(said: object) -> None:
    read = read_source({"remote_kv_source": said})
    assert isinstance(read, Declined)
    assert (read.kind, read.answer.why) == ("fetch", HintRefusal.MALFORMED)
