"""Conversations are seeded requests whose prompts grow by what was answered: made-to-order load for a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvmover.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Habits:
    """How people talk: the shared system prompt, and the spans from which lengths are drawn. All in tokens."""

    vocab: int = 512
    system_tokens: int = 96
    user_tokens: range = range(8, 49)
    answer_tokens: range = range(4, 17)

    def __post_init__(self) -> None:
        if self.vocab < 2 or self.system_tokens < 0:
            raise LayoutError(f"habits need two words and no negative system prompt, got {self}")
        for span in (self.user_tokens, self.answer_tokens):
            if not span or min(span) < 1:
                raise LayoutError(f"a length is drawn from {span}: it must hold numbers, all positive")


PLAIN = Habits()


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what its conversation has not seen yet. The first turn's new tokens begin with the system prompt."""

    conversation: int
    number: int
    new_tokens: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """All tokens so far. The prompt of a turn is everything said before it, answers too, and the turn's new tokens.

    >>> talk = Conversation().said([1, 2]).said([7])
    >>> talk.said([3, 4]).tokens
    (1, 2, 7, 3, 4)
    """

    tokens: tuple[int, ...] = ()

    def said(self, tokens: Sequence[int]) -> Conversation:
        """The conversation after a user's new tokens, or after an answer."""
        return Conversation(self.tokens + tuple(tokens))


def conversations(seed: int, count: int, turns: int, habits: Habits = PLAIN) -> list[Turn]:
    """`count` conversations of `turns` turns each, interleaved at random, in order of arrival.

    The turns of one conversation arrive in their order, and each one must be answered before the next is asked.
    """
    if count < 1 or turns < 1:
        raise LayoutError(f"{count} conversations of {turns} turns hold no request")
    random = Random(seed)

    def words(tokens: int) -> tuple[int, ...]:
        return tuple(random.randrange(habits.vocab) for _ in range(tokens))

    system = words(habits.system_tokens)
    order = [conversation for conversation in range(count) for _ in range(turns)]
    random.shuffle(order)
    asked = [0] * count
    arrivals: list[Turn] = []
    for conversation in order:
        number = asked[conversation]
        asked[conversation] += 1
        new_tokens = words(random.choice(habits.user_tokens))
        if number == 0:
            new_tokens = system + new_tokens
        arrivals.append(Turn(conversation, number, new_tokens, random.choice(habits.answer_tokens)))
    return arrivals
