"""Conversations are the same for the same seed, arrive interleaved, and share their system prompt."""

from __future__ import annotations

import doctest
from collections import defaultdict

import pytest

from kvmover.errors import LayoutError
from kvmover.tools.demo import requests as module
from kvmover.tools.demo.requests import Conversation, Habits, Turn, conversations


def test_the_example_in_the_module_holds() -> None:
    assert doctest.testmod(module).failed == 0


def test_the_same_seed_gives_the_same_turns_and_another_seed_does_not() -> None:
    assert conversations(3, 4, 3) == conversations(3, 4, 3)
    assert conversations(3, 4, 3) != conversations(4, 4, 3)


def test_every_conversation_has_its_turns_in_order_and_they_interleave() -> None:
    turns = conversations(0, count=5, turns=4)
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for turn in turns:
        numbers[turn.conversation].append(turn.number)
    assert dict(numbers) == {conversation: [0, 1, 2, 3] for conversation in range(5)}
    assert turns != sorted(turns, key=lambda turn: (turn.conversation, turn.number))


def test_only_first_turns_begin_with_the_system_prompt_and_all_of_them_with_the_same() -> None:
    habits = Habits(vocab=100, system_tokens=40, user_tokens=range(5, 9), answer_tokens=range(2, 3))
    turns = conversations(1, count=6, turns=2, habits=habits)
    firsts = [turn for turn in turns if turn.number == 0]
    assert len({turn.new_tokens[:40] for turn in firsts}) == 1
    assert len({turn.new_tokens[40:] for turn in firsts}) == 6
    assert {len(turn.new_tokens) for turn in firsts} <= set(range(45, 49))
    assert {len(turn.new_tokens) for turn in turns if turn.number} <= set(range(5, 9))
    assert all(0 <= token < 100 for turn in turns for token in turn.new_tokens)
    assert {turn.answer_tokens for turn in turns} == {2}


def test_the_prompt_of_a_turn_holds_the_answers_before_it() -> None:
    first, second = Turn(0, 0, (1, 2), 2), Turn(0, 1, (3,), 2)
    prompt = Conversation().said(first.new_tokens).said([8, 9]).said(second.new_tokens)
    assert prompt.tokens == (1, 2, 8, 9, 3)


def test_lengths_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"range\(0, 4\)"):
        Habits(user_tokens=range(4))
    with pytest.raises(LayoutError, match="0 conversations"):
        conversations(0, 0, 1)
