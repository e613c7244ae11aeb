"""Traces made up for tests, and what can be reused of them by comparing everything with everything."""

from __future__ import annotations

import random

from kvmover.tools.replay import ReplayRequest


def generated(seed: int, count: int = 60) -> list[ReplayRequest]:
    """Chats that branch off each other at any block: each prompt is some earlier one's first blocks and new ones."""
    chance = random.Random(seed)
    chats: list[tuple[int, ...]] = [()]
    requests, fresh = list[ReplayRequest](), 0
    for number in range(count):
        before = chance.choice(chats)
        kept = before[: chance.randint(0, len(before))]
        new = tuple(range(fresh, fresh + chance.randint(0 if kept else 1, 3)))
        fresh += len(new)
        ids = kept + new
        cut = chance.choice([0, 0, 1, 63, 64, 100, 511])
        requests.append(ReplayRequest(number * 1000, len(ids) * 512 - cut, 10, ids))
        # A block that was cut short comes back longer, or shorter still.
        chats.append(ids)
    return requests


def common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def brute_force(requests: list[ReplayRequest], page_tokens: int) -> int:
    """Hit tokens of a cache without end, by comparing every prompt with all before it, token by token."""
    hits, earlier = 0, list[list[int]]()
    for request in requests:
        tokens = [block * 512 + at for block in request.hash_ids for at in range(512)][: request.input_length]
        kept = [prompt[: len(prompt) // page_tokens * page_tokens] for prompt in earlier]
        longest = max((common(tokens[:-1], prompt) for prompt in kept), default=0)
        hits += longest // page_tokens * page_tokens
        earlier.append(tokens)
    return hits
