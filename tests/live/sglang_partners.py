"""Mistakes of who sends SGLang's requests or starts its servers, each made through whatever moves the KV."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.live.answers import Answer, many
from tests.live.checkpoints import copied_adapters, other_weights
from tests.live.conftest import ModelMaker
from tests.live.partners import MIX_UPS, OTHER_DTYPE, Asked, Mixed, adapters_mixed_up, exchanged, mixed_up, not_mixed_up
from tests.live.server import Command, Server
from tests.live.sglang_client import Room, ask, generate, room_at, rooms_at
from tests.live.sglang_servers import DECODE, sglang

#: A half waits so long for the other, in either backend.
PATIENCE_S = 10
PATIENCE = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(PATIENCE_S),
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(PATIENCE_S),
}


@dataclass(frozen=True, slots=True)
class Halves:
    """A prefill and a decode. `elsewhere`: another prefill of the same model."""

    prefill: Server
    decode: Server
    elsewhere: Server


@dataclass(frozen=True, slots=True)
class Lab:
    """Halves of a model, and what a plain server of it says."""

    plain: Server
    halves: Halves

    def alone(self, asked: Sequence[Asked]) -> list[Answer]:
        return many(lambda each: served(self.plain, each), asked)

    def through(self, asked: Sequence[Asked], timeout_s: float = 120.0) -> list[Answer]:
        """Returns what both halves answer to requests of which each means the same."""
        return one_for_another(self.halves, [(each, each) for each in asked], timeout_s)


def served(server: Server, asked: Asked, room: Room | None = None, timeout_s: float = 120.0) -> Answer:
    return ask(server, asked.prompt, 16, {**(room or {}), **asked.said}, timeout_s)


def one_for_another(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers where each of two prompts came to one half, in one room."""

    def both(request: Mixed) -> Answer:
        return _in_rooms(halves, request, room_at(halves.prefill), timeout_s)

    return many(both, requests)


def from_another_prefill(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers where it is sent to a prefill that has not got the prompt."""

    def both(request: Mixed) -> Answer:
        room = room_at(halves.prefill)
        other = {**room, "bootstrap_port": halves.elsewhere.command.bootstrap_port}
        return _in_rooms(halves, request, room, timeout_s, other)

    return many(both, requests)


def _in_rooms(halves: Halves, request: Mixed, room: Room, timeout_s: float, other: Room | None = None) -> Answer:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(served, halves.prefill, request[0], room, timeout_s)
        second = pool.submit(served, halves.decode, request[1], other or room, timeout_s)
        first.result()
        return second.result()


def in_one_room(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers where two prompts, each right on both halves, came at once in one room."""
    got = list[Answer]()
    for (one, _), (other, _) in zip(requests[::2], requests[1::2], strict=True):
        room = room_at(halves.prefill)
        with ThreadPoolExecutor(4) as pool:
            begun = [
                pool.submit(served, half, each, room, timeout_s)
                for each in (one, other)
                for half in (halves.prefill, halves.decode)
            ]
            got += [each.result() for each in begun[1::2]]
    return got


def in_a_room_again(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers where it is sent to a room whose request, of another prompt, is over."""

    def twice(request: Mixed) -> Answer:
        room = room_at(halves.prefill)
        _in_rooms(halves, (request[0], request[0]), room, timeout_s)
        return served(halves.decode, request[1], room, timeout_s)

    return many(twice, requests)


def in_another_order(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers to a list of prompts that prefill got in another order."""
    bodies = [
        {
            "input_ids": [each.prompt for each in half],
            "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
            "return_logprob": True,
            **rooms,
        }
        for rooms in [rooms_at(halves.prefill, len(requests))]
        for half in zip(*requests, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        servers = halves.prefill, halves.decode
        begun = [
            pool.submit(generate, server, body, None, timeout_s) for server, body in zip(servers, bodies, strict=True)
        ]
        got = [each.result() for each in begun][1]
    return got if len(got) == len(requests) else got * len(requests)


#: By name: its requests, of a seed, and how they are made.
Way = Callable[[Halves, Sequence[Mixed], float], list[Answer]]
MISTAKES: Mapping[str, tuple[Callable[[int], list[Mixed]], Way]] = {
    **{name: (partial(mixed_up, name), one_for_another) for name in MIX_UPS},
    "one room for two prompts at once": (not_mixed_up, in_one_room),
    "a room whose request is over": (partial(mixed_up, next(iter(MIX_UPS))), in_a_room_again),
    "a list of prompts in another order": (exchanged, in_another_order),
    "KV of another prefill than computed the prompt": (not_mixed_up, from_another_prefill),
}


def of_adapters(what: str) -> list[Mixed]:
    """Returns requests for a mistake of ADAPTERS."""
    return adapters_mixed_up(what, lambda name: {"lora_path": name} if name else {})


def meant(asked: Sequence[Asked]) -> list[Asked]:
    """Returns requests that mean the same at every server: what decode calls `C` is `B` everywhere."""
    return [Asked(each.prompt, {"lora_path": "B"}) if each.said == {"lora_path": "C"} else each for each in asked]


def with_adapters(folder: Path, third: str, model: ModelMaker) -> tuple[str, ...]:
    """Returns the arguments of a server of the adapters of `copied_adapters`."""
    arguments = "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8", "--max-loras-per-batch", "4"
    return *arguments, "--lora-paths", *copied_adapters(folder, third, model, "sglang")


def decodes_of_other_models(name: str, folder: Path, model: ModelMaker, **named: Any) -> Mapping[str, Command]:
    """Returns decodes that cannot go on with the KV of "llama", by what somebody did wrong.

    `folder`: where a prefill of "llama" runs from, which has other weights from now on.
    """
    source = model("llama", "sglang")
    shutil.rmtree(folder)
    others: Mapping[str, tuple[Path, Mapping[str, Any]]] = {
        "other weights of the same shape": (other_weights(source, folder.parent / "other"), {}),
        "other weights at the same path": (other_weights(source, folder), {}),
        "a model of more layers": (model("llama-other", "sglang"), {}),
        "a model of more heads": (model("llama-doubled", "sglang"), {}),
        OTHER_DTYPE: (source, {"dtype": "bfloat16"}),
    }
    return {
        what: sglang(f"{name}-{number}", path, mode=DECODE, environment=PATIENCE, **own, **named)
        for number, (what, (path, own)) in enumerate(others.items())
    }
