"""SGLang's own TokenizerManager sends a request for each answer to a prompt, each in a room of its own."""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench import Rank, Shape, finish, start
from check_pd import PAGES, ROOM, KVPoll, Side, _failed, asked, params, places, polled, publish

from kvmover.engines.sglang import engine_pd
from kvmover.engines.sglang.answer_rooms import room_of

requests: Any = import_module("sglang.srt.managers.io_struct")
tokenizer: Any = import_module("sglang.srt.managers.tokenizer_manager")

#: What is measured of a request on its way to the scheduler.
TIMES = ("set_api_server_dispatch_time", "set_api_server_dispatch_finish_time", "set_finished_time")


def test_each_answer_to_a_prompt_has_a_room_of_its_own_the_same_on_both_halves(tmp_path: Path) -> None:
    """SGLang's own gives them names that differ, and one room. What warms its prefix cache keeps that."""
    backend = {"disaggregation_transfer_backend": "kvmover"}
    halves = [
        finish(start(Shape(), tmp_path / mode, sent_for, 3, disaggregation_mode=mode, port=port, **backend))[0]
        for port, mode in enumerate(("prefill", "decode"), 1)
    ]
    names, rooms = zip(*(zip(*half, strict=True) for half in halves), strict=True)
    assert set(names[0]).isdisjoint(names[1])
    assert rooms[0] == rooms[1]
    assert rooms[0][:2] == (ROOM, ROOM + 1)
    assert rooms[0][2:] == tuple(room_of(room, number) for room in (ROOM, ROOM + 1) for number in (1, 2, 3))
    assert len(set(rooms[0])) == 8


def test_a_list_of_prompts_keeps_its_rooms_and_so_does_what_another_backend_moves(tmp_path: Path) -> None:
    for number, (backend, answers) in enumerate((("kvmover", 1), ("nixl", 3)), 1):
        served = {"disaggregation_transfer_backend": backend, "disaggregation_mode": "decode", "port": number}
        (sent,) = finish(start(Shape(), tmp_path / backend, sent_for, answers, **served))
        assert {room for _, room in sent} == {ROOM, ROOM + 1}


def test_several_answers_of_a_prefill_that_is_asked_once_are_refused_at_once(tmp_path: Path) -> None:
    served = {"disaggregation_transfer_backend": "kvmover", "disaggregation_mode": "decode", "port": 1}
    (reason,) = finish(start(Shape(), tmp_path, asked_of_another_make, **served))
    assert reason.startswith("the prefill at 127.0.0.1:9 computes one answer to a prompt, and 3 were asked for")


def asked_of_another_make(rank: Rank) -> str:
    side, address, info = Side(rank, "decode"), "127.0.0.1:9", engine_pd.foreign_prefill()
    side.manager._resolve_rank_mapping(info)
    side.manager.prefill_info_table[address], side.manager._exchange.foreign[address] = info, None
    receiver = side.classes["receiver"](side.manager, address, ROOM)
    receiver.init(0)
    req = asked(range(PAGES * side.page))
    req.sampling_params.n = 3
    publish(side, req, receiver, places(side, 1, 0), 0)
    assert polled(receiver.poll, KVPoll.Success, KVPoll.Failed) == KVPoll.Failed
    assert not side.manager.is_moving(ROOM)
    return _failed(receiver)


def sent_for(rank: Rank, answers: int) -> list[tuple[str, int]]:
    """Names and rooms of what SGLang's own TokenizerManager sends for two prompts, of so many answers each."""
    given = requests.GenerateReqInput(
        input_ids=[[1, 2, 3], [4, 5]], sampling_params={"n": answers}, bootstrap_room=ROOM, rid=["a", "b"]
    )
    given.normalize_batch_and_arguments()
    manager, sent = object.__new__(tokenizer.TokenizerManager), list[Any]()
    times = SimpleNamespace(**dict.fromkeys(TIMES, lambda: None))
    manager.rid_to_state = defaultdict(lambda: SimpleNamespace(time_stats=times, lora_released=False))
    manager.encoder_dispatch_ready = {}
    manager.cuda_vmm_feature_transport = SimpleNamespace(prepare_for_dispatch_async=nothing)
    manager.positional_embeds_transport = SimpleNamespace(prepare_for_dispatch=lambda _: [])
    manager._should_use_batch_tokenization = lambda *_: False
    manager._tokenize_one_request = tokenize
    manager._wait_one_response = answer
    manager._init_req_state = lambda _: None
    manager._mark_state_dispatched = lambda _: None
    manager._dispatch_to_scheduler = sent.append

    async def handle() -> None:
        states = {name: manager.rid_to_state[name] for name in given.rid}
        async for _ in manager._handle_batch_request(given, None, states):
            pass

    asyncio.run(handle())
    return [(each.rid, each.bootstrap_room) for each in sent]


async def nothing(_: Any) -> list[Any]:
    return []


async def answer(given: Any, _: Any) -> AsyncIterator[str]:
    yield given.rid


async def tokenize(given: Any) -> Any:
    absent = dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    return requests.TokenizedGenerateReqInput(
        rid=given.rid,
        input_ids=array("q", given.input_ids),
        sampling_params=params.SamplingParams(**given.sampling_params),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        bootstrap_room=given.bootstrap_room,
        time_stats=SimpleNamespace(**dict.fromkeys(TIMES, lambda: None)),
        **absent,
    )
