"""Mistakes of who sends vLLM's requests or starts its servers, each made through whatever moves the KV."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.live.answers import Answer, many, post
from tests.live.checkpoints import copied_adapters, other_weights
from tests.live.conftest import ModelMaker
from tests.live.partners import MIX_UPS, OTHER_DTYPE, Asked, Mixed, adapters_mixed_up, mixed_up, not_mixed_up
from tests.live.server import Command, Server
from tests.live.vllm_client import FOR_ANOTHER, ask, ask_several
from tests.live.vllm_servers import vllm

#: With the endpoint that empties a prefix cache.
RESETS = {"VLLM_SERVER_DEV_MODE": "1"}


@dataclass(frozen=True, slots=True)
class Halves:
    """A prefill and a decode. `elsewhere`: another prefill of the same model."""

    prefill: Server
    decode: Server
    elsewhere: Server


def served(server: Server, asked: Asked, params: Mapping[str, Any] | None = None, timeout_s: float = 120.0) -> Answer:
    return ask(server, asked.prompt, 1 if params is FOR_ANOTHER else 16, params, timeout_s, **asked.said)


def alone(server: Server, asked: Sequence[Asked], timeout_s: float = 120.0) -> list[Answer]:
    """Returns what a server answers to requests without any parameters."""
    return many(lambda each: served(server, each, None, timeout_s), asked)


def forget(server: Server) -> None:
    """Empty the prefix cache of a server that was started with RESETS."""
    post(f"{server.url}/reset_prefix_cache", {})


def one_for_another(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers to each second request, with what prefill has answered to the first."""

    def both(request: Mixed) -> Answer:
        half = served(halves.prefill, request[0], FOR_ANOTHER, timeout_s)
        return served(halves.decode, request[1], half.params, timeout_s)

    return many(both, requests)


def from_another_prefill(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers where it is sent to a prefill that has another prompt."""

    def both(request: Mixed) -> Answer:
        one, other = (
            served(server, each, FOR_ANOTHER, timeout_s)
            for server, each in zip(
                (halves.prefill, halves.elsewhere), (request[0], _backwards(request[0])), strict=True
            )
        )
        where = {name: (other.params or {}).get(name) for name in ("remote_engine_id", "remote_host", "remote_port")}
        return served(halves.decode, request[1], {**(one.params or {}), **where}, timeout_s)

    return many(both, requests)


def _backwards(asked: Asked) -> Asked:
    return Asked(asked.prompt[::-1], asked.said)


def under_one_name(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers where two prompts came to prefill at once with one `transfer_id`, from a router that
    drops what it does not know."""
    got = list[Answer]()
    for number, two in enumerate(zip(requests[::2], requests[1::2], strict=True)):
        params = {**FOR_ANOTHER, "transfer_id": f"same-{number}-{len(two[0][0].prompt)}"}
        with ThreadPoolExecutor(2) as pool:
            begun = [pool.submit(ask, halves.prefill, one.prompt, 1, params, timeout_s) for one, _ in two]
            known = [{**(each.result().params or {}), "kvmover_content": None} for each in begun]
            begun = [
                pool.submit(served, halves.decode, other, each, timeout_s)
                for (_, other), each in zip(two, known, strict=True)
            ]
            got += [each.result() for each in begun]
    return got


def as_a_list(halves: Halves, requests: Sequence[Mixed], timeout_s: float) -> list[Answer]:
    """Returns what decode answers to a list of prompts: the parameters of prefill's answer are those of the first."""
    prompts = [each.prompt for each, _ in requests]
    (half, *_) = ask_several(halves.prefill, prompts, 1, FOR_ANOTHER, timeout_s)
    got = ask_several(halves.decode, prompts, 16, half.params, timeout_s)
    return got if len(got) == len(prompts) else got * len(prompts)


#: By name: its requests, of a seed, and how they are made.
Way = Callable[[Halves, Sequence[Mixed], float], list[Answer]]
MISTAKES: Mapping[str, tuple[Callable[[int], list[Mixed]], Way]] = {
    **{name: (partial(mixed_up, name), one_for_another) for name in MIX_UPS},
    "one transfer_id for two prompts at once": (not_mixed_up, under_one_name),
    "a list of prompts with the parameters of the first": (not_mixed_up, as_a_list),
    "KV of another prefill than computed the prompt": (not_mixed_up, from_another_prefill),
}


def of_adapters(what: str) -> list[Mixed]:
    """Returns requests for a mistake of ADAPTERS."""
    return adapters_mixed_up(what, lambda name: {"model": name or "m"})


def with_adapters(folder: Path, third: str, model: ModelMaker) -> tuple[str, ...]:
    """Returns the arguments of a server of the adapters of `copied_adapters`."""
    return "--enable-lora", "--max-lora-rank", "8", "--lora-modules", *copied_adapters(folder, third, model, "vllm")


def decodes_of_other_models(name: str, folder: Path, model: ModelMaker, **named: Any) -> Mapping[str, Command]:
    """Returns decodes that cannot go on with the KV of "qwen3", by what somebody did wrong.

    `folder`: where a prefill of "qwen3" runs from, which has other weights from now on.
    """
    source = model("qwen3", "vllm")
    shutil.rmtree(folder)
    others: Mapping[str, tuple[Path, Mapping[str, Any]]] = {
        "other weights of the same shape": (other_weights(source, folder.parent / "other"), {}),
        "other weights at the same path": (other_weights(source, folder), {}),
        "a model of more layers": (model("qwen3-other", "vllm"), {}),
        "a model of more heads": (model("qwen3-doubled", "vllm"), {}),
        OTHER_DTYPE: (source, {"dtype": "bfloat16"}),
    }
    return {
        what: vllm(f"{name}-{number}", path, **own, **named)
        for number, (what, (path, own)) in enumerate(others.items())
    }
