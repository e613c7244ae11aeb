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

from kvmover.engines.sglang import plugin
from kvmover.engines.sglang.answer_rooms import room_of

plugins: Any = import_module("sglang.srt.plugins.hook_registry")
plugin.register()
plugins.HookRegistry.apply_hooks()
params: Any = import_module("sglang.srt.sampling.sampling_params")
requests: Any = import_module("sglang.srt.managers.io_struct")
tokenizer: Any = import_module("sglang.srt.managers.tokenizer_manager")

ROOM = 4711

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


def sent_for(rank: Rank, answers: int) -> list[tuple[str, int]]:
    """Names and rooms of what SGLang's own TokenizerManager sends for two prompts, of so many answers each."""
    asked = requests.GenerateReqInput(
        input_ids=[[1, 2, 3], [4, 5]], sampling_params={"n": answers}, bootstrap_room=ROOM, rid=["a", "b"]
    )
    asked.normalize_batch_and_arguments()
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
        states = {name: manager.rid_to_state[name] for name in asked.rid}
        async for _ in manager._handle_batch_request(asked, None, states):
            pass

    asyncio.run(handle())
    return [(each.rid, each.bootstrap_room) for each in sent]


async def nothing(_: Any) -> list[Any]:
    return []


async def answer(asked: Any, _: Any) -> AsyncIterator[str]:
    yield asked.rid


async def tokenize(asked: Any) -> Any:
    absent = dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    return requests.TokenizedGenerateReqInput(
        rid=asked.rid,
        input_ids=array("q", asked.input_ids),
        sampling_params=params.SamplingParams(**asked.sampling_params),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        bootstrap_room=asked.bootstrap_room,
        time_stats=SimpleNamespace(**dict.fromkeys(TIMES, lambda: None)),
        **absent,
    )
