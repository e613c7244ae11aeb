"""A trace is dealt to several prefill engines and replayed, to count each request's loaded and computed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmover.tools.replay import ReplayConfig, Requests, Server

#: Most prompt tokens of an engine, over the mean: the bound of consistent hashing with bounded loads. Otherwise one
#: system prompt would send all requests to one engine.
_BOUND = 1.25

Numbers = npt.NDArray[np.int64]


class PrefixRouter:
    """A router that picks the engine sent most of a request's leading blocks, within the load bound.

    It knows only the blocks sent, and misses evictions, like routers that receive no events.
    """

    def __init__(self, engines: int) -> None:
        self._blocks = [set[int]() for _ in range(engines)]
        self._tokens = [0] * engines

    def choose(self, blocks: tuple[int, ...], tokens: int) -> int:
        """Choose the engine for a prompt of `tokens` tokens, and count them as its load. Returns its number, from 0.

        Of the engines within the load bound it is the one that was sent most leading `blocks`, of equals the least
        loaded.
        """
        limit = _BOUND * (sum(self._tokens) + tokens) / len(self._tokens)
        able = [n for n, load in enumerate(self._tokens) if load + tokens <= limit] or range(len(self._tokens))
        chosen = max(able, key=lambda n: (self._leading(n, blocks), -self._tokens[n]))
        self._blocks[chosen].update(blocks)
        self._tokens[chosen] += tokens
        return chosen

    def _leading(self, engine: int, blocks: tuple[int, ...]) -> int:
        held = self._blocks[engine]
        return next((n for n, block in enumerate(blocks) if block not in held), len(blocks))


@dataclass(frozen=True, slots=True, eq=False)
class Prefills:
    """The arrival, engine, tokens and hits by tier of each request, in order of arrival."""

    arrived_us: npt.NDArray[np.float64]
    engines: Numbers
    tokens: Numbers
    device_tokens: Numbers
    host_tokens: Numbers
    storage_tokens: Numbers

    @property
    def computed_tokens(self) -> Numbers:
        """Returns the tokens of each request found in no tier."""
        return self.tokens - self.device_tokens - self.host_tokens - self.storage_tokens

    @property
    def hit_rate(self) -> float:
        """Returns the share of all prompt tokens found in a tier."""
        return 1 - float(self.computed_tokens.sum() / self.tokens.sum())


def prefills(requests: Requests, config: ReplayConfig, engines: int, step: Callable[[int], object] = int) -> Prefills:
    """Replay `requests` on `engines` engines, each with its own cache as in `config`, storage included.

    `step` gets increments of requests done. Raises ReplayConfigError for a prompt larger than the device.
    """
    router, servers = PrefixRouter(engines), [Server(config) for _ in range(engines)]
    rows: list[tuple[int, ...]] = []
    arrived_us: list[float] = []
    for request in requests:
        engine = router.choose(request.hash_ids, request.input_length)
        credit = servers[engine].serve(request)
        arrived_us.append(request.arrived_s * 1e6)
        hits = (credit.device_tokens, credit.host_tokens, credit.storage_tokens)
        rows.append((engine, request.input_length, *hits))
        if len(rows) % 256 == 0:
            step(256)
    step(len(rows) % 256)
    return Prefills(np.array(arrived_us), *np.array(rows, np.int64).reshape(-1, 5).T)
