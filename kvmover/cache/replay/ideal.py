"""What a cache that never forgets would reuse, token by token: the yardstick of a replay, by way of hash ids alone."""

from __future__ import annotations

from kvmover.cache.replay.trace import BLOCK_TOKENS, Request


class Ideal:
    """Remembers of every block how many of its first tokens were ever computed.

    An id names the whole prefix up to its block, so the blocks of a prompt are looked up each on its own, until one is
    not known as far as the prompt wants it.
    """

    def __init__(self) -> None:
        self._known = dict[int, int]()

    def serve(self, request: Request) -> int:
        """Tokens at the beginning of this prompt that an earlier one began with; then this prompt is known too."""
        known, reused, left = self._known, 0, request.input_length
        whole = True
        for block in request.hash_ids:
            wanted = min(left, BLOCK_TOKENS)
            have = known.get(block, 0)
            if whole:
                reused += min(have, wanted)
                whole = have >= wanted
            if have < wanted:
                known[block] = wanted
            left -= wanted
        return reused


def in_pages(tokens: int, page_tokens: int) -> int:
    """Tokens of the whole pages among the first `tokens`."""
    return tokens - tokens % page_tokens
