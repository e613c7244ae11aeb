"""Hints of an orchestrator to SGLang: a session's KV stays while its tool runs, moves down and comes back up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmover.tools.scrape import Scrape
from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port
from tests.live.sglang.test_live_sglang_radix import told
from tests.live.sglang.test_live_sglang_tiers import tiered
from tests.live.sglang_client import ask, counted, warm
from tests.live.sglang_servers import sglang
from tests.live.table import Results

#: Room for four prompts; pins may have a quarter of it, 512 tokens.
_LITTLE = ("--max-total-tokens", "2048", "--chunked-prefill-size", "256", "--radix-cache-backend", "kvmover")
_PAGE = 16


def hints(*actions: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """What an orchestrator sends beside a prompt: (name, type, payload) of each."""
    said = [
        {"action_id": name, "action_type": kind, "action_version": "1.0", "payload": payload}
        for name, kind, payload in actions
    ]
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": said}}


def session(seed: int, tokens: int = 400) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(tokens)]


def answered(server: Server, action: str, outcome: str) -> float:
    """Hints that were met, or refused for this reason."""
    port = int(server.command.environment["KVMOVER_METRICS_PORT"])
    scrape = Scrape.of(server.get("/metrics", port)[1], 0.0)
    return scrape.total("kvmover_hints_total", action=action, outcome=outcome)


def until(seen: Callable[[], bool]) -> None:
    for _ in range(300):
        if seen():
            return
        time.sleep(0.1)
    raise AssertionError("never seen")


def next_turn(prompt: list[int], answer: Answer, seed: int) -> list[int]:
    """With the answer, and what the tool said."""
    return [*prompt, *answer.tokens, *session(seed, 40)]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_sessions_kv_stays_while_its_tool_runs_and_a_crowd_takes_all_else(
    tp: int, plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    (server,) = servers.start(
        sglang(
            f"sglang-hints-tp{tp}",
            model("llama", "sglang"),
            *_LITTLE,
            tp=tp,
            environment={"KVMOVER_METRICS_PORT": str(free_port()), "KVMOVER_HINTS_LONGEST_PIN_S": "3600"},
        )
    )
    warm(plain.ready(), server)
    pinned, other = session(1), session(2)
    crowd = prompts_of(12, seed=3, least_tokens=450, most_tokens=500)
    asked: list[list[int]] = [pinned, other]
    got = [ask(server, pinned, 8, hints(("session", "kv.pin", {"ttl_seconds": 1800}))), ask(server, other, 8)]
    assert answered(server, "pin", "met") == 1
    assert counted(server, "kvmover_pinned_pages") == 25

    got += many(lambda prompt: ask(server, prompt, 8), crowd)
    asked += crowd
    before = {source: told(server, source) for source in ("device", "computed")}
    turns = next_turn(pinned, got[0], 4), next_turn(other, got[1], 5)
    back = [ask(server, turn, 8) for turn in turns]
    assert [answer.cached_tokens for answer in back] == [400, 0]
    assert told(server, "device") - before["device"] == 400
    assert told(server, "computed") - before["computed"] == sum(map(len, turns)) - 400
    got, asked = [*got, *back], [*asked, *turns]

    # A flood of pins has its share, and the crowd goes on as before.
    flood = prompts_of(12, seed=6, least_tokens=450, most_tokens=500)
    wants = [hints((f"flood {number}", "kv.pin", {"ttl_seconds": 1800})) for number in range(len(flood))]
    got += [ask(server, prompt, 8, want) for prompt, want in zip(flood, wants, strict=True)]
    asked += flood
    assert answered(server, "pin", "share_taken") == len(flood)
    assert counted(server, "kvmover_pinned_pages") == 25

    # What cannot be met is refused, and its request served.
    got.append(
        ask(server, pinned, 8, hints(("a", "kv.demote", {}), ("b", "kv.retain", {"priority": 1}), ("c", "x", {})))
    )
    asked.append(pinned)
    assert got[-1].cached_tokens == 400 - _PAGE
    for action, outcome in (("demote", "no_host"), ("retain", "no_priorities"), ("other", "unknown")):
        assert answered(server, action, outcome) == 1

    # Its last turn ends the pin, and it goes as all else does.
    got.append(ask(server, pinned, 8, hints(("session", "kv.pin", {"ttl_seconds": 0}))))
    asked.append(pinned)
    assert counted(server, "kvmover_pinned_pages") == 0
    got += many(lambda prompt: ask(server, prompt, 8), crowd)
    got.append(ask(server, pinned, 8))
    asked += [*crowd, pinned]
    assert got[-1].cached_tokens == 0

    # One that could not run beside a pin is not kept waiting by it.
    assert ask(server, pinned, 8, hints(("session", "kv.pin", {"ttl_seconds": 1800}))).ok
    assert counted(server, "kvmover_pinned_pages") == 25
    got.append(ask(server, session(7, 1700), 8))
    asked.append(session(7, 1700))
    assert counted(server, "kvmover_pinned_pages") == 0

    wanted = many(lambda prompt: ask(plain, prompt, 8), asked)
    said = "of two sessions after a crowd: 400 tokens of the pinned one, 0 of the other"
    assert not results.add("sglang", f"a pinned session and a crowd, TP{tp}", wanted, got, said).failed
    servers.stop([server])


def test_a_session_that_rests_goes_to_the_host_and_comes_up_before_its_next_turn(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    (server,) = servers.start(tiered("sglang-hints-tiers", model("llama", "sglang"), tmp_path))
    warm(plain.ready(), server)
    rests = session(11)
    demote = hints(("rest", "kv.demote", {}), ("publish", "kv.share", {}))
    asked, got = [rests], [ask(server, rests, 8, demote)]
    assert answered(server, "demote", "met") == answered(server, "share", "met") == 1
    until(lambda: counted(server, "kvmover_tier_demoted_pages_total") == 25)
    before = told(server, "host")
    asked.append(next_turn(rests, got[0], 12))
    got.append(ask(server, asked[-1], 8))
    assert told(server, "host") - before == got[-1].cached_tokens == 400

    # Of a cache that has forgotten, storage has what was shared; a hint brings it up, and no request waits.
    until(lambda: not counted(server, "kvmover_tier_open_operations") + counted(server, "kvmover_tier_writing_pages"))
    time.sleep(1.0)  # the counts are half a second old at most
    assert server.get("/flush_cache")[0] == 200
    loaded = counted(server, "kvmover_tier_loaded_pages_total")
    carrier = session(13, 20)
    asked.append(carrier)
    got.append(ask(server, carrier, 8, hints(("soon", "kv.prefetch", {"token_ids": rests}))))
    assert answered(server, "prefetch", "met") == 1
    until(lambda: counted(server, "kvmover_tier_loaded_pages_total") - loaded >= 25)
    before = {source: told(server, source) for source in ("device", "host", "storage")}
    asked.append(next_turn(rests, got[0], 14))
    got.append(ask(server, asked[-1], 8))
    found = {source: told(server, source) - before[source] for source in before}
    assert found == {"device": 400, "host": 0, "storage": 0}

    wanted = many(lambda prompt: ask(plain, prompt, 8), asked)
    said = "demoted: 400 tokens from the host; prefetched from storage: 400 on the device"
    assert not results.add("sglang", "a session demoted, shared and prefetched", wanted, got, said).failed
    servers.stop([server])
