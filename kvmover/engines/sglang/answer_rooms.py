"""Each of several answers to a prompt has a room of its own here: SGLang sends a request for each, all in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from math import lcm
from typing import Any

#: From the room of one answer to the next: far more than a list has prompts, whose rooms follow one another, and a
#: multiple of all numbers of data-parallel groups up to 16, which SGLang chooses by the remainder of a room.
STEP = lcm(*range(1, 17)) << 25

#: Rooms are below this.
_END = 1 << 63

#: How many requests were sent in each room, while SGLang sends those of one that asks for several answers.
_sent: ContextVar[Counter[int] | None] = ContextVar("kvmover_sent", default=None)


def room_of(room: int, number: int) -> int:
    """Returns the room of request `number` of those that SGLang sends in `room`: the same on both halves, and on all
    their ranks.

    >>> room_of(7001, 0), room_of(7001, 2) - 7001 == 2 * STEP, room_of(_END - 1, 2) - (_END - 1) == -2 * STEP
    (7001, True, True)
    """
    far = number * STEP
    return room + far if room + far < _END else room - far


def of_several(
    handle: Callable[..., AsyncGenerator[Any, None]], manager: Any, obj: Any, *more: Any
) -> AsyncIterator[Any]:
    """Have SGLang's TokenizerManager number what it sends for one that asks for several answers to a prompt: first a
    request of no tokens, for its prefix cache, then one an answer."""
    answers = handle(manager, obj, *more)
    return _numbered(answers) if getattr(obj, "parallel_sample_num", 1) > 1 else answers


async def _numbered(answers: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    _sent.set(Counter())
    async with aclosing(answers):
        try:
            async for answer in answers:  # by the first, all are sent
                _sent.set(None)
                yield answer
        finally:
            _sent.set(None)


def in_own_room(send: Callable[..., Awaitable[None]], manager: Any, tokenized: Any) -> Awaitable[None]:
    """Send one of SGLang's requests, in the room of its number."""
    sent, room = _sent.get(), getattr(tokenized, "bootstrap_room", None)
    if sent is not None and room is not None:
        tokenized.bootstrap_room = room_of(room, sent[room])
        sent[room] += 1
    return send(manager, tokenized)
