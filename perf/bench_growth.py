"""A long prompt that is computed in chunks: how long after its last chunk it has landed, sent whole and as computed.

Two processes of one host over NIXL. 4,096 tokens of 64 KiB in eight chunks; a pause stands for the computation of each,
as a GPU's would: it takes none of the cores that copy. Whole: the request is sent when its last chunk is computed.
As computed: the pages of each chunk are named when it is. Decode has asked before either begins.

`python -m perf.bench_growth` takes about a minute and writes `results/growth.csv`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from kvmover.plan import HOST, Route
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Gate, Transfer
from perf.command_line import options
from perf.record import Spread, write
from perf.transfer_pair import ARENA_BYTES, PAGE_TOKENS, PAGES, PAUSE_S, TOKENS, Pair

CHUNKS, COMPUTE_S, ROUNDS = 8, 0.1, 7
CONFIG = MoverConfig(arena_bytes=ARENA_BYTES, route=Route.PACKED, costs=replace(HOST, chunk_bytes=8 << 20))
VERBS = {"pushed": CONFIG, "pulled": replace(CONFIG, verb=Verb.PULL)}


class Prefill(Pair):
    """A source that computes what it sends."""

    def whole(self, config: MoverConfig) -> float:
        """Seconds from the last chunk computed to landed, of a request that is sent then."""
        request = self._asked(config)
        for _ in range(CHUNKS):
            self._compute()
        computed = time.perf_counter()
        return self._landed(self.side.mover.send(request, [self._pages]), computed)

    def as_computed(self, config: MoverConfig) -> float:
        """The same, of a request whose chunks are named as they are computed."""
        request, each = self._asked(config), PAGES // CHUNKS
        offered = self.side.mover.send(request, [[]], [])
        for chunk in range(CHUNKS):
            self._compute()
            pages = self._pages[chunk * each : (chunk + 1) * each]
            gate = Gate(None, tokens=(chunk + 1) * each * PAGE_TOKENS)
            computed = time.perf_counter()
            self.side.mover.produced(offered, gate, [pages])
        return self._landed(offered, computed)

    def _asked(self, config: MoverConfig) -> str:
        request = f"{time.monotonic_ns()}"
        self._pipe.send((config, request, TOKENS))
        return request

    def _compute(self) -> None:
        until = time.perf_counter() + COMPUTE_S
        while time.perf_counter() < until:
            if not self.side.mover.poll():
                time.sleep(PAUSE_S)

    def _landed(self, offered: Transfer, computed: float) -> float:
        self.side.mover.wait([offered])
        offered.landed()
        self._pipe.recv()
        return time.perf_counter() - computed


def main() -> None:
    options(__doc__).parse_args()
    pair = Prefill()
    calls: Mapping[str, Callable[[], float]] = {
        f"{verb}, {way.__name__.replace('_', ' ')}": partial(way, config)
        for verb, config in VERBS.items()
        for way in (pair.whole, pair.as_computed)
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):  # in turn, after one round unmeasured
        for name, call in calls.items():
            seconds = call()
            if number:
                samples[name].append(seconds)
    pair.close()
    rows = list[dict[str, object]]()
    for name, seconds in samples.items():
        spread = Spread.of(seconds)
        rows.append(
            {
                "way": name,
                "tokens": TOKENS,
                "chunks": CHUNKS,
                "compute_ms_a_chunk": round(COMPUTE_S * 1e3),
                "after_last_chunk_ms": round(spread.median * 1e3, 1),
                "low_ms": round(spread.low * 1e3, 1),
                "high_ms": round(spread.high * 1e3, 1),
            }
        )
        print(f"{name:24} {rows[-1]['after_last_chunk_ms']:>8} ms after the last chunk")
    write("growth", rows)


if __name__ == "__main__":
    main()
