"""Whose KV a vLLM request gets: that of its own prompt, adapter, images and salt, and of no other of the same name."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_scheduler import REMOTE, TOKENS, Request, content, received, step, tables

from kvmover.engines.common import PromptParts, answer, content_of
from kvmover.engines.vllm.connector_metadata import KvmoverConnectorMetadata, ReceiveSpec, ReleaseSpec
from kvmover.engines.vllm.readers import Readers, ReaderTurn
from kvmover.engines.vllm.scheduler import ConnectorScheduler, Home, RequestOutcome
from kvmover.engines.vllm.vllm_content import parts_of
from kvmover.transfer import Content
from kvmover.transfer.protocol.content import IdentityCheck
from kvmover.transfer.result import Service
from tests.safetensors_files import tiny, write_file

HOME = Home("prefill", "10.0.0.1", 5600)
UNKNOWN = Content(100, unknown="adapter in a folder that is gone")


def decode(**how: Any) -> ConnectorScheduler:
    return ConnectorScheduler(TOKENS, **how)


def asks(scheduler: ConnectorScheduler, name: str = "d-1", said: Content | None = None, readers: int = 1) -> Request:
    """A request whose parameters name the prompt that `said` is, or none."""
    params = answer(REMOTE, said or content(), readers)
    request = Request(name, kv_transfer_params={**params, **({} if said else {"kvmover_content": None})})
    scheduler.new(request)
    return request


@pytest.mark.parametrize("identity", IdentityCheck)
@pytest.mark.parametrize("said", [content(99), content_of([7, *range(1, 100)]), Content(100, bytes(16))])
def test_kv_of_another_prompt_is_not_fetched_and_not_let_go(
    said: Content, identity: IdentityCheck, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = decode(identity=identity)
    with caplog.at_level(logging.WARNING):
        requests = [asks(scheduler, f"d-{number}", said) for number in range(3)]
    for request in requests:
        assert scheduler.matched(request, 32) == 0
        scheduler.allocated(request, tables(), 0)
        scheduler.finished(request, tables(), RequestOutcome.DELIVERED)
    assert step(scheduler) == KvmoverConnectorMetadata()  # the KV is somebody else's: it is for them to ask
    assert scheduler.take_counts() == {"mistaken_requests": 3}
    assert scheduler.take_counts() == {}
    (line,) = caplog.messages  # one of three in a minute
    assert line == f"d-0 is computed here: the KV is of {said}, and {content()} were asked for"


def test_where_a_router_left_the_prompt_out_the_source_is_asked_with_ours() -> None:
    scheduler = decode()
    request = asks(scheduler)
    assert scheduler.matched(request, 0) == 100
    scheduler.allocated(request, tables(), 100)
    assert step(scheduler).receives == [ReceiveSpec("d-1", REMOTE, 0, 100, tables(), content())]


@pytest.mark.parametrize("ours", [True, False])
def test_a_prompt_that_one_half_cannot_name_is_computed_unless_it_is_trusted(ours: bool) -> None:
    for identity, found in ((IdentityCheck.CHECKED, 0), (IdentityCheck.TRUST, 100)):
        scheduler = decode(identity=identity)
        request = Request("d-1", kv_transfer_params=answer(REMOTE, content() if ours else UNKNOWN))
        if ours:
            request.lora_request = SimpleNamespace(lora_path="/nowhere/adapter")
        scheduler.new(request)
        assert scheduler.matched(request, 0) == found


def test_the_digest_is_of_the_whole_prompt_though_a_prefill_stops_short_of_it() -> None:
    scheduler = ConnectorScheduler(TOKENS, late=True, left_tokens=1, home=HOME)
    request = Request("p-1", kv_transfer_params={"do_remote_decode": True})
    scheduler.new(request)
    scheduler.matched(request, 0)
    assert request.num_prompt_tokens == 99
    step(scheduler, (request, 99))
    _, told = scheduler.finished(request, tables(), RequestOutcome.DELIVERED)
    assert told == answer(REMOTE, content())
    assert [send.content for send in step(scheduler).sends] == [content()]


def served(*children: str, **how: Any) -> tuple[ConnectorScheduler, list[Request], list[dict[str, Any] | None]]:
    """A prefill engine that was asked for several answers to one prompt, and what it tells of each."""
    scheduler = ConnectorScheduler(TOKENS, home=HOME, **how)
    requests = [Request(name, kv_transfer_params={"do_remote_decode": True}) for name in children]
    for request in requests:
        scheduler.new(request)
    for request in requests:
        scheduler.matched(request, 0)
        scheduler.allocated(request, tables(), 0)
    first = step(scheduler, *[(request, 100) for request in requests])
    told, kept = [], []
    for request in requests:
        request.generated = 1
        keeps, params = scheduler.finished(request, tables(), RequestOutcome.DELIVERED)
        told.append(params)
        kept.append(keeps)
    assert [(send.request, send.transfer) for send in first.sends] == [(children[0], children[0])]
    assert first.sends[0].service is Service.REPEATED  # the others may come a step later
    assert kept == [True, *[False] * (len(children) - 1)]
    assert step(scheduler).delayed == {children[0]}
    return scheduler, requests, told


@pytest.mark.parametrize("answers", [1, 2, 4])
def test_of_several_answers_to_one_prompt_one_is_offered_for_all_and_the_others_hold_no_blocks(answers: int) -> None:
    names = [f"{number}_cmpl-7-0-ab" for number in range(answers)]
    _, _, told = served(*names)
    where = replace(REMOTE, transfer=names[0])
    assert told == [answer(where, content(), max(2, answers))] * answers


def test_requests_whose_names_look_alike_and_whose_prompts_do_not_are_offered_each() -> None:
    scheduler = ConnectorScheduler(TOKENS, home=HOME)
    requests = [Request(f"{n}_cmpl", n + 90, kv_transfer_params={"do_remote_decode": True}) for n in range(3)]
    for request in requests:
        scheduler.new(request)
    metadata = step(scheduler, *[(request, request.num_prompt_tokens) for request in requests])
    assert [send.transfer for send in metadata.sends] == ["0_cmpl", "1_cmpl", "2_cmpl"]


def test_later_prompts_of_a_list_are_offered_to_nobody_unless_their_client_names_them() -> None:
    """The answer to a list tells of its first prompt alone: blocks of the others would wait for their deadline."""
    for params, offered in (({}, ["cmpl-7-0-0123abcd"]), ({"transfer_id": "t"}, ["t", "t"])):
        scheduler = ConnectorScheduler(TOKENS, home=HOME)
        requests = [
            Request(f"cmpl-7-{n}-0123abcd", 90 + n, kv_transfer_params={"do_remote_decode": True, **params})
            for n in range(2)
        ]
        for request in requests:
            scheduler.new(request)
        metadata = step(scheduler, *[(request, request.num_prompt_tokens) for request in requests])
        assert [send.transfer for send in metadata.sends] == offered
        kept = [scheduler.finished(request, tables(), RequestOutcome.DELIVERED) for request in requests]
        assert [keeps for keeps, _ in kept] == [True, bool(params)]
        assert [bool(told) for _, told in kept] == [True, bool(params)]


def test_of_several_answers_one_fetches_and_the_others_wait_and_find_its_blocks() -> None:
    scheduler = decode()
    first, second, third = (asks(scheduler, f"{n}_d", content(), 3) for n in range(3))
    assert scheduler.matched(first, 0) == 100
    scheduler.allocated(first, tables(), 100)
    assert [scheduler.matched(request, 0) for request in (second, third)] == [None, None]
    assert [receive.request for receive in step(scheduler).receives] == ["0_d"]
    received(scheduler, "0_d")
    assert scheduler.matched(second, 0) is None  # its blocks are found once it is scheduled
    metadata = step(scheduler, (first, 1))
    assert metadata.releases == [ReleaseSpec(REMOTE, 100, content())]  # the source serves as often as it is asked
    for request in (second, third):
        assert scheduler.matched(request, 96) == 0
        scheduler.allocated(request, tables(), 0)
    assert step(scheduler, (second, 4), (third, 4)) == KvmoverConnectorMetadata()
    for request in (first, second, third):
        scheduler.finished(request, tables(), RequestOutcome.DELIVERED)
    assert step(scheduler) == KvmoverConnectorMetadata()
    assert not scheduler.readers._open


def test_without_a_prefix_cache_each_fetches_in_turn_and_the_last_lets_go() -> None:
    scheduler = decode(readers=Readers(is_cached=False))
    requests = [asks(scheduler, f"{n}_d", content(), 2) for n in range(2)]
    for number, request in enumerate(requests):
        assert scheduler.matched(request, 0) == 100
        scheduler.allocated(request, tables(), 100)
        assert [receive.request for receive in step(scheduler).receives] == [f"{number}_d"]
        received(scheduler, f"{number}_d")
        releases = step(scheduler, (request, 1)).releases
        assert releases == ([ReleaseSpec(REMOTE, 100, content())] if number else [])


def test_without_a_prefix_cache_the_source_is_kept_for_those_that_come_late() -> None:
    scheduler = decode(readers=Readers(is_cached=False))
    for number, releases in enumerate([0, 1]):
        request = asks(scheduler, f"{number}_d", content(), 2)
        assert scheduler.matched(request, 0) == 100
        scheduler.allocated(request, tables(), 100)
        received(scheduler, f"{number}_d")
        assert len(step(scheduler, (request, 1)).releases) == releases
    lonely = asks(scheduler, "0_e", content(), 2)
    assert scheduler.matched(lonely, 0) == 0  # that source was let go


def test_without_a_prefix_cache_the_source_is_let_go_when_nobody_is_left_who_could_ask() -> None:
    scheduler = decode(readers=Readers(is_cached=False))
    request = asks(scheduler, "0_d", content(), 2)
    scheduler.matched(request, 0)
    scheduler.allocated(request, tables(), 100)
    received(scheduler, "0_d")
    assert step(scheduler, (request, 1)).releases == []
    scheduler.finished(request, tables(), RequestOutcome.DELIVERED)
    assert step(scheduler).releases == [ReleaseSpec(REMOTE, 100, content())]


def test_an_answer_that_is_used_again_is_computed_and_nobody_is_asked() -> None:
    scheduler = decode()
    for number, found in enumerate([100, 0]):
        request = asks(scheduler, f"d-{number}", content())
        assert scheduler.matched(request, 0) == found
        scheduler.allocated(request, tables(), found)
        received(scheduler, request.request_id)
        metadata = step(scheduler, (request, 1))
        assert (len(metadata.receives), metadata.releases) == (1 - number, [])
        scheduler.finished(request, tables(), RequestOutcome.DELIVERED)


def test_who_waits_is_not_left_waiting_by_one_that_is_aborted() -> None:
    scheduler = decode()
    first, second = (asks(scheduler, f"{n}_d", content(), 2) for n in range(2))
    scheduler.matched(first, 0)
    scheduler.allocated(first, tables(), 100)
    step(scheduler)
    first.over = True
    scheduler.finished(first, tables(), RequestOutcome.ABORTED)
    assert scheduler.matched(second, 0) == 0
    scheduler.allocated(second, tables(), 0)
    scheduler.finished(second, tables(), RequestOutcome.DELIVERED)


def test_of_those_that_never_began_the_last_lets_go() -> None:
    scheduler = decode()
    requests = [asks(scheduler, f"{n}_d", content(), 2) for n in range(2)]
    for request in requests:
        scheduler.finished(request, (), RequestOutcome.ABORTED)
    assert step(scheduler).releases == [ReleaseSpec(REMOTE, 100, content())]


def test_readers_come_to_an_end_in_every_order() -> None:
    """Of three readers, one of which fetches first: however they end, each has a turn and the source is released."""
    key = REMOTE, content()
    for is_cached in (True, False):
        for serves in (1, 3):
            for order in ("abc", "acb", "bac", "bca", "cab", "cba"):
                readers, released = Readers(is_cached), 0
                for name in order:
                    readers.came(key, name, serves)
                for name in order:
                    turn = readers.turn(key)
                    assert turn is not ReaderTurn.WAIT
                    if turn is ReaderTurn.FETCH:
                        readers.begun(key, name)
                        assert readers.turn(key) is ReaderTurn.WAIT
                        released += readers.settled(key, name)
                    else:
                        released += readers.gone(key, name)
                for name in order:
                    if key in readers._open and name in readers._open[key].members:
                        released += readers.gone(key, name)
                assert released == (serves > 1)
                assert not readers._open


def test_the_parts_of_a_request_are_told_by_their_bytes(tmp_path: Path) -> None:
    assert parts_of(Request()) == PromptParts()
    assert parts_of(Request(cache_salt="salt")) == PromptParts(salt="salt")
    for name, seed in (("a", 1), ("copy", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        write_file(tmp_path / name / "adapter_model.safetensors", tiny(seed))
    a, copy, b = (
        parts_of(Request(lora_request=SimpleNamespace(lora_path=str(tmp_path / name)))) for name in ("a", "copy", "b")
    )
    assert a == copy != b
    assert "nowhere" in parts_of(Request(lora_request=SimpleNamespace(lora_path="/nowhere"))).unknown


def image(pixels: torch.Tensor | int | None, offset: int = 5, name: str = "id") -> SimpleNamespace:
    """As vLLM has it: processed tensors by name, an id that may be made of the request's name, and a place."""
    data = None if pixels is None else {"pixel_values": SimpleNamespace(data=pixels)}
    where = SimpleNamespace(offset=offset, length=8)
    return SimpleNamespace(data=data, identifier=name, mm_hash=name, modality="image", mm_position=where)


def test_an_image_is_its_tensors_and_its_place_and_not_its_name() -> None:
    one, other = torch.zeros(4, 6), torch.ones(4, 6)
    assert parts_of(Request(mm_features=[image(one)])) == parts_of(Request(mm_features=[image(one, name="other")]))
    assert parts_of(Request(mm_features=[image(one)])) != parts_of(Request(mm_features=[image(other)]))
    assert parts_of(Request(mm_features=[image(one)])) != parts_of(Request(mm_features=[image(one, 6)]))
    assert len(parts_of(Request(mm_features=[image(one), image(other, 40)])).before(40).inputs) == 1
    nested = SimpleNamespace(data={"pixel_values": SimpleNamespace(data=[one, [other]])}, modality="image")
    nested.mm_position = image(one).mm_position
    assert parts_of(Request(mm_features=[nested])).unknown == ""
    for elsewhere in (None, 4096):  # in memory that processes share, only its address is here
        assert "not in the scheduler's process" in parts_of(Request(mm_features=[image(elsewhere)])).unknown
