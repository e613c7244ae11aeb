"""The requests that SGLang sends for one prompt with several answers share a bootstrap room; here each gets its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from math import lcm
from typing import Any

#: Distance between the rooms of two answers, beyond the consecutive rooms of a list's prompts. A multiple of 1 to 16,
#: because SGLang picks one of that many data-parallel groups by the remainder of a room.
STEP = lcm(*range(1, 17)) << 25

#: Exclusive upper bound of rooms.
_END = 1 << 63

#: Requests sent per room while SGLang sends those of a prompt with several answers; None otherwise.
_sent: ContextVar[Counter[int] | None] = ContextVar("kvmover_sent", default=None)


def room_of(room: int, number: int) -> int:
    """Returns the room of request `number` of those that SGLang sends in `room`; all ranks compute the same.

    >>> room_of(7001, 0), room_of(7001, 2) - 7001 == 2 * STEP, room_of(_END - 1, 2) - (_END - 1) == -2 * STEP
    (7001, True, True)
    """
    far = number * STEP
    return room + far if room + far < _END else room - far


def of_several(
    handle: Callable[..., AsyncGenerator[Any, None]], manager: Any, obj: Any, *more: Any
) -> AsyncIterator[Any]:
    """Number the requests that SGLang's TokenizerManager sends for `obj` if it asks for several answers.

    SGLang first sends a request without tokens, for its prefix cache, then one per answer.
    """
    answers = handle(manager, obj, *more)
    return _numbered(answers) if getattr(obj, "parallel_sample_num", 1) > 1 else answers


async def _numbered(answers: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    _sent.set(Counter())
    async with aclosing(answers):
        try:
            async for answer in answers:  # all requests are sent before the first answer comes
                _sent.set(None)
                yield answer
        finally:
            _sent.set(None)


def in_own_room(send: Callable[..., Awaitable[None]], manager: Any, tokenized: Any) -> Awaitable[None]:
    """Send a tokenized request; among a prompt's several requests, in the room of its number."""
    sent, room = _sent.get(), getattr(tokenized, "bootstrap_room", None)
    if sent is not None and room is not None:
        tokenized.bootstrap_room = room_of(room, sent[room])
        sent[room] += 1
    return send(manager, tokenized)
