"""Hints of any payload, through their reader, on a tree with pins: each is met, or refused in words."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.hints import (
    Declined,
    HintDesk,
    HintedTiers,
    HintError,
    HintMet,
    HintRefused,
    PinLimits,
    Pins,
    read_hints,
)
from kvmover.cache.hints.actions import KINDS, LeaseHint
from kvmover.cache.prefix import FULL, PRIORITY, PrefixTree, RadixKey
from tests.drawn_values import damaged, drawn
from tests.proofs import searched

PROMPTS = [tuple(range(first, first + tokens)) for first in (0, 2, 100) for tokens in (1, 4, 9)]
USUAL: dict[str, list[Any]] = {
    "ttl_s": [0.0, 5.0, 30.0, 601.0],
    "priority": [0, 1, 7],
}


class Willing:
    """Tiers that begin whatever they are asked for."""

    stores = True

    def publish(self, node: int) -> bool:
        return node >= 0

    def demote(self, node: int) -> bool:
        return node >= 0

    def bring(self, key: RadixKey) -> bool:
        return key.tokens > 0


def envelope(dice: Random) -> object:
    """What a client may send: JSON, also of other kinds and versions, with a prefix of its own or not, and damaged."""
    actions: list[dict[str, Any]] = []
    for _ in range(dice.choice([0, 1, 2, 3, 17])):
        try:
            hint = drawn(dice.choice([*KINDS.values(), LeaseHint]), dice, ["request_completion"], USUAL)
        except ValueError:  # a lease that its own class refuses
            continue
        payload = {key: value for key, value in msgspec.to_builtins(hint).items() if value is not None}
        if dice.random() < 0.5:
            payload["token_ids"] = dice.choice(PROMPTS)
        if dice.random() < 0.1:
            payload |= dice.choice([{"ttl_seconds": math.nan}, {"priority": -1}, {"more": 1}, {"token_ids": [1 << 32]}])
        kind = dice.choice([*KINDS, "kv.other"]) if dice.random() < 0.2 else f"kv.{_kind(hint)}"
        version = dice.choice(["1.0", "1.0", "1.0", "2.0", ""])
        name = dice.choice(["a", "b", "x" * 256])
        actions.append({"action_id": name, "action_type": kind, "action_version": version, "payload": payload})
    said = msgspec.json.encode({"protocol_version": "0.1", "message_id": "m", "actions": actions})
    return msgspec.json.decode(damaged(said, dice) if dice.random() < 0.2 else said)


def _kind(hint: Any) -> str:
    return {made: kind.removeprefix("kv.") for kind, made in KINDS.items()}.get(type(hint), "retain")


@searched(few=10, many=250, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
@pytest.mark.usefixtures("used_core")
def test_every_hint_that_is_read_is_met_or_refused_in_words(seed: int) -> None:
    dice = Random(seed)
    tree = PrefixTree(2, policy=PRIORITY) if seed % 2 else PrefixTree(2)
    pins = Pins(tree, {FULL: 16}, PinLimits(share=0.5, most=2))
    tiers: HintedTiers | None = Willing() if seed % 3 else None
    desk, now, pages = HintDesk(tree, pins, tiers), 0.0, iter(range(1 << 20))
    for _ in range(20):
        now += dice.choice([0.0, 1.0, 40.0])
        prompt = dice.choice(PROMPTS)
        if dice.random() < 0.5:
            tree.insert(prompt, [next(pages) for _ in range(len(prompt) // 2)])
        try:
            read = read_hints(envelope(dice))
        except (HintError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        for action in read:
            if isinstance(action, Declined):
                assert action.answer.words
                continue
            key = tree.key(action.hint.token_ids or prompt)
            answer = desk.carry_out(action, key, now, largest=dice.choice([0, 3, 16, 1 << 62]))
            assert isinstance(answer, HintMet | HintRefused), action
        pins.end(pins.over(now))
        tree.evict(dice.choice([0, 1, 4]))
        pins.check()
        tree.check()
