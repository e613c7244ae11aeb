"""Hints of an orchestrator to vLLM: a session's KV stays while its tool runs and a crowd takes all else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port, labelled
from tests.live.table import Results
from tests.live.vllm_client import ask, warm
from tests.live.vllm_servers import kvmover, vllm

#: Room for four prompts; pins may have a quarter of it, 33 blocks.
_LITTLE = ("--num-gpu-blocks-override", "132", "--enable-prompt-tokens-details", "--max-num-seqs", "2")


def session(seed: int, tokens: int = 400) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(tokens)]


def hints(name: str, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_params` with one hint of an orchestrator."""
    action = {"action_id": name, "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"kvmover_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


class Hinted:
    """A server with its ledger, which is behind its ranks' ports; what was asked of it, and what it said."""

    def __init__(self, server: Server, tp: int) -> None:
        self.server, self._port = server, int(server.command.environment["KVMOVER_METRICS_PORT"]) + tp
        self.asked, self.got = list[list[int]](), list[Answer]()

    def ask(self, prompt: list[int], params: dict[str, Any] | None = None) -> Answer:
        self.asked.append(prompt)
        self.got.append(ask(self.server, prompt, 8, params))
        return self.got[-1]

    def crowd(self, seed: int) -> None:
        prompts = prompts_of(12, seed=seed, least_tokens=450, most_tokens=500)
        self.asked += prompts
        self.got += many(lambda prompt: ask(self.server, prompt, 8), prompts, at_once=2)

    def answered(self, action: str, outcome: str) -> float:
        lines = self.server.get("/metrics", self._port)[1].splitlines()
        said = [line for line in lines if line.startswith("kvmover_hints_total{")]
        mine = [line for line in said if f'action="{action}"' in line and f'outcome="{outcome}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in mine)

    @property
    def pinned_blocks(self) -> float:
        return self.server.metrics("kvmover_pinned_pages", port=self._port)["kvmover_pinned_pages"]

    def told(self, source: str) -> float:
        return labelled(self.server, "kvmover_prompt_tokens_total", source, self._port)


@pytest.mark.parametrize(("kind", "tp"), [("kv.pin", 1), ("kv.retain", 2)])
def test_a_sessions_kv_stays_while_its_tool_runs(
    kind: str, tp: int, plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    environment = {"KVMOVER_METRICS_PORT": str(free_port()), "KVMOVER_HINTS_LONGEST_PIN_S": "3600"}
    command = vllm(f"vllm-hints-tp{tp}", model("qwen3", "vllm"), *_LITTLE, kv=kvmover(), tp=tp, environment=environment)
    (server,) = servers.start(command)
    warm(plain.ready(), server)
    hinted, name = Hinted(server, tp), kind.removeprefix("kv.")
    pinned, other = session(1), session(2)
    rank = {"priority": 3} if name == "retain" else {}
    first = hinted.ask(pinned, hints("session", kind, {"ttl_seconds": 1800, **rank}))
    second = hinted.ask(other)
    assert hinted.answered(name, "met") == 1
    assert hinted.pinned_blocks == 25

    hinted.crowd(3)
    before = {source: hinted.told(source) for source in ("device", "computed")}
    turns = [[*pinned, *first.tokens, *session(4, 40)], [*other, *second.tokens, *session(5, 40)]]
    assert [hinted.ask(turn).cached_tokens for turn in turns] == [400, 0]
    assert hinted.told("device") - before["device"] == 400
    assert hinted.told("computed") - before["computed"] == sum(map(len, turns)) - 400

    # What cannot be met is refused, and its request served.
    refused = {"kv.demote": "no_host", "kv.share": "no_store", "kv.prefetch": "no_store", "kv.evict": "unknown"}
    for wish, why in refused.items():
        assert hinted.ask(pinned, hints("a", wish, {})).cached_tokens == 400 - 16
        assert hinted.answered("other" if why == "unknown" else wish.removeprefix("kv."), why) == 1

    # Its last turn ends the pin, and it goes as all else does.
    hinted.ask(pinned, hints("session", "kv.pin", {"ttl_seconds": 0}))
    assert hinted.pinned_blocks == 0
    hinted.crowd(6)
    assert hinted.ask(pinned).cached_tokens == 0

    # One that could not run beside a pin is not kept waiting by it.
    hinted.ask(pinned, hints("session", "kv.pin", {"ttl_seconds": 1800}))
    assert hinted.pinned_blocks == 25
    hinted.ask(session(7, 1800))
    assert hinted.pinned_blocks == 0

    wanted = many(lambda prompt: ask(plain, prompt, 8), hinted.asked)
    said = "of two sessions after a crowd: 400 tokens of the pinned one, 0 of the other"
    assert not results.add("vllm", f"a session under {kind} and a crowd, TP{tp}", wanted, hinted.got, said).failed
    servers.stop([server])
