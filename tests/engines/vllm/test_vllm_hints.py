"""What an orchestrator says with vLLM's requests, over blocks as vLLM counts them, without vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvmover.cache.hints import HintAnswer, HintMet, PinLimits
from kvmover.engines.vllm.request_hints import RequestHints
from kvmover.engines.vllm.scheduler import RequestOutcome


@dataclass(eq=False)
class Block:
    block_id: int
    references: int = 1


class Pool:
    """16 blocks, by request, each of which has one reference while its request runs."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Block]] = {}
        self.total = 16

    def of(self, request: str) -> Sequence[Block]:
        return self.requests[request]

    def cached(self, request: str) -> Sequence[Block]:
        return self.requests[request]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            assert block.references > 0
            block.references -= 1


class Place:
    def __init__(self, stored: bool = False, **limits: float) -> None:
        self.pool, self.now_s, self.told = Pool(), 0.0, Counter[tuple[str, str]]()
        self.hints = RequestHints(
            self.pool, [4], PinLimits(**limits), lambda: stored, lambda: stored, self.count, lambda: self.now_s
        )

    def count(self, request: Any, kind: str, answer: HintAnswer) -> None:
        self.told[kind, "met" if isinstance(answer, HintMet) else str(answer.why)] += 1

    def serve(
        self,
        name: str,
        blocks: Sequence[Block],
        *actions: tuple[str, dict[str, Any]],
        outcome: RequestOutcome = RequestOutcome.DELIVERED,
        tokens: int = 0,
        inside: bool = False,
    ) -> None:
        said = [
            {"action_id": f"{name} {kind}", "action_type": kind, "action_version": "1.0", "payload": payload}
            for kind, payload in actions
        ]
        envelope = {"protocol_version": "0.1", "message_id": name, "actions": said}
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=4 * len(blocks),
            num_computed_tokens=4 * len(blocks) + 2,
            max_tokens=tokens,
            kv_hints=None if inside else envelope,
            kv_transfer_params={"kvmover_hints": envelope} if inside else None,
        )
        self.hints.came(request)
        self.pool.requests[name] = list(blocks)
        self.hints.ended(request, outcome)
        self.pool.free_blocks(blocks)
        self.hints.pins.check()


def blocks(*numbers: int) -> list[Block]:
    return [Block(number) for number in numbers]


PIN = ("kv.pin", {"ttl_seconds": 30})


def test_a_pin_refers_to_the_blocks_until_a_request_comes_after_its_time() -> None:
    place, kept = Place(), blocks(1, 2, 3)
    place.serve("r", kept, PIN)
    assert [block.references for block in kept] == [1, 1, 1]
    place.now_s = 29.9
    place.serve("second", blocks(4))
    assert len(place.hints.pins) == 1
    place.now_s = 30.0
    place.serve("third", blocks(5))
    assert [block.references for block in kept] == [0, 0, 0]
    assert place.told == {("pin", "met"): 1}


def test_the_envelope_may_stand_among_the_transfer_parameters() -> None:
    place, kept = Place(), blocks(1, 2)
    place.serve("r", kept, PIN, inside=True)
    assert place.hints.pins.pages == 2


def test_what_is_retained_for_a_time_is_pinned_for_it() -> None:
    place, kept = Place(), blocks(1, 2)
    place.serve("r", kept, ("kv.retain", {"priority": 9, "ttl_seconds": 30, "block_hashes": ["7"]}))
    assert [block.references for block in kept] == [1, 1]
    place.now_s = 30.0
    place.serve("second", blocks(5))
    assert [block.references for block in kept] == [0, 0]
    assert place.told == {("retain", "met"): 1}


def test_blocks_that_two_pins_share_count_once_and_the_share_is_kept() -> None:
    place, common = Place(share=0.25), blocks(1, 2, 3)
    place.serve("a", common, PIN)
    for block in common:
        block.references += 1
    place.serve("b", [*common, *blocks(4)], PIN)
    assert (place.hints.pins.pages, len(place.hints.pins)) == (4, 2)
    more = blocks(5, 6)
    place.serve("c", more, PIN)
    assert [block.references for block in more] == [0, 0]
    assert place.told == {("pin", "met"): 2, ("pin", "share_taken"): 1}


def test_a_request_that_could_not_run_beside_a_pin_ends_it() -> None:
    place, kept = Place(), blocks(1, 2, 3)
    place.serve("r", kept, PIN)
    place.serve("fits", blocks(4), tokens=44)
    assert place.hints.pins.pages == 3
    place.serve("large", blocks(4), tokens=48)
    assert [block.references for block in kept] == [0, 0, 0]


def test_an_aborted_request_pins_nothing() -> None:
    place, kept = Place(), blocks(1, 2)
    place.serve("r", kept, PIN, outcome=RequestOutcome.ABORTED)
    assert [block.references for block in kept] == [0, 0]
    assert place.told == {("pin", "aborted"): 1}


def test_what_a_store_does_anyway_is_met_by_it_and_the_rest_is_refused() -> None:
    asked = (("kv.share", {}), ("kv.prefetch", {}), ("kv.retain", {"priority": 1}), ("kv.demote", {}))
    for stored, outcome in ((True, "met"), (False, "no_store")):
        place = Place(stored)
        place.serve("r", blocks(1), *asked, ("kv.pin", {"ttl_seconds": 1, "token_ids": [1]}))
        assert place.told == {
            ("share", outcome): 1,
            ("prefetch", outcome): 1,
            ("retain", "no_priorities"): 1,
            ("demote", "no_host"): 1,
            ("pin", "own_alone"): 1,
        }
