"""Requests of the demo: seeded conversations that grow by their answers, or a Mooncake trace, scaled down.

In a trace equal hash ids become equal tokens, so shared prefixes stay shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random

from kvmover.errors import KvmoverError, LayoutError
from kvmover.tools.replay import ReplayRequest, TraceOptions, read_trace

#: Tokens of a trace's hash id.
BLOCK_TOKENS = 512
FAST25 = TraceOptions("mooncake", BLOCK_TOKENS)
_WORD = 2**64 - 1

#: Longest answer: the demo is about moving, not about generating.
MOST_ANSWER_TOKENS = 8


class TraceError(KvmoverError, ValueError):
    """An impossible scale, or a request too large for the demo."""


@dataclass(frozen=True, slots=True)
class Habits:
    """The lengths of a chat, in tokens: the shared system prompt, and spans to draw other lengths from.

    Raises LayoutError for an empty span or fewer than two words.
    """

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
    """A request: its conversation's new tokens. The first turn's begin with the system prompt."""

    conversation: int
    number: int
    new_tokens: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation's tokens so far. A turn's prompt is all of them, answers too, and the turn's new tokens.

    >>> talk = Conversation().said([1, 2]).said([7])
    >>> talk.said([3, 4]).tokens
    (1, 2, 7, 3, 4)
    """

    tokens: tuple[int, ...] = ()

    def said(self, tokens: Sequence[int]) -> Conversation:
        """Returns the conversation extended by a user's new tokens, or by an answer."""
        return Conversation(self.tokens + tuple(tokens))


def conversations(seed: int, count: int, turns: int, habits: Habits = PLAIN) -> list[Turn]:
    """Make `count` conversations of `turns` turns each, interleaved at random, in order of arrival.

    A conversation's turns arrive in order, and each must be answered before the next is asked. Raises LayoutError if
    either number is below 1.
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


@dataclass(slots=True)
class Chats:
    """Requests from the conversation generator: prompts grow by the answers, so later turns share prefixes."""

    turns: list[Turn]
    talks: dict[int, Conversation]

    @classmethod
    def seeded(cls, seed: int, requests: int) -> Chats:
        """Make `requests` turns of a few interleaved conversations."""
        count = max(1, requests // 3)
        return cls(conversations(seed, count, -(-requests // count))[:requests], {})

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (prompt, answer length); call `answered` before asking for the next."""
        for turn in self.turns:
            talk = self.talks.get(turn.conversation, Conversation()).said(turn.new_tokens)
            self.talks[turn.conversation] = talk
            yield talk.tokens, min(turn.answer_tokens, MOST_ANSWER_TOKENS)
            self.talks[turn.conversation] = talk.said(self._answer)

    _answer: tuple[int, ...] = ()

    def answered(self, tokens: list[int]) -> None:
        """Set the generated tokens, for the next prompt of the conversation."""
        self._answer = tuple(tokens)


@dataclass(frozen=True, slots=True)
class TraceScale:
    """The reduction of a trace: tokens are taken modulo `vocab`, and every length is multiplied by `factor`.

    A block of 512 tokens becomes `block_tokens` tokens in any request: equal blocks stay equal, and distinct ones
    distinct if vocab ** block_tokens is far above their number. Raises TraceError for a vocabulary below 2 or a factor
    outside (0, 1].
    """

    vocab: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.vocab < 2 or not 0 < self.factor <= 1:
            raise TraceError(f"a scale needs two words and a factor in (0, 1], got {self}")

    @property
    def block_tokens(self) -> int:
        """Returns the tokens left of a 512-token block."""
        return self.of(BLOCK_TOKENS)

    def of(self, tokens: int) -> int:
        """Returns a scaled length: at least one token, unless it was 0."""
        return max(1, round(tokens * self.factor)) if tokens else 0


@dataclass(frozen=True, slots=True)
class Traced:
    """Requests of a trace, scaled down for a small model: (prompt, answer length)."""

    requests: tuple[tuple[tuple[int, ...], int], ...]

    @classmethod
    def read(cls, path: Path, scale: TraceScale, requests: int, most_tokens: int) -> Traced:
        """Read the first `requests` of the file.

        Raises KvmoverError for an unreadable or empty file, TraceError for a scaled prompt with no room in
        `most_tokens`.
        """
        found: list[tuple[tuple[int, ...], int]] = []
        for number, request in enumerate(islice(read_trace(path, FAST25), requests)):
            prompt = prompt_of(request, scale)
            if len(prompt) + MOST_ANSWER_TOKENS > most_tokens:
                raise TraceError(
                    f"{path.name} request {number}: {len(prompt):,} tokens at --scale {scale.factor}, and the"
                    f" demo's pools hold {most_tokens - MOST_ANSWER_TOKENS:,}"
                )
            answer_tokens = scale.of(request.output_length)
            found.append((prompt, min(max(answer_tokens, 1), MOST_ANSWER_TOKENS)))
        return cls(tuple(found))

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], int]]:
        return iter(self.requests)

    def answered(self, tokens: list[int]) -> None:
        """Ignore the answer: a trace continues as recorded."""


def prompt_of(request: ReplayRequest, scale: TraceScale) -> tuple[int, ...]:
    """Returns the scaled prompt: whole blocks, the last one cut as in the trace."""
    tokens = [token for hash_id in request.hash_ids for token in block_of(hash_id, scale)]
    whole = len(request.hash_ids) - 1
    rest = request.input_length - whole * BLOCK_TOKENS
    return tuple(tokens[: whole * scale.block_tokens + scale.of(rest)])


@lru_cache(maxsize=4096)
def block_of(hash_id: int, scale: TraceScale) -> tuple[int, ...]:
    """Returns the tokens of a block: token i is mix(hash_id * 512 + i) modulo the vocabulary."""
    first = hash_id * BLOCK_TOKENS
    return tuple(_mix(first + token) % scale.vocab for token in range(scale.block_tokens))


def _mix(value: int) -> int:
    """Hash with the finaliser of splitmix64: otherwise a 512-token block would be another, shifted, modulo 512."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
