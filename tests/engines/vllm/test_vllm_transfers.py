"""What a rank's transfers do with the tables of vLLM's worker, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np

from kvmover.engines.common import Cards, Remote
from kvmover.engines.vllm.connector_metadata import ReceiveSpec, SendSpec
from kvmover.engines.vllm.transfers import RequestTransfers
from kvmover.transfer import Gate, Mover, Progress
from tests.transfer.mover_fleets import Pair


class LateProgress:
    """Makes calls when it is told to: a thread that is busy with a copy."""

    def __init__(self, mover: Mover) -> None:
        self.mover, self.calls, self.late = mover, list[Callable[[], None]](), True

    def begin(self, call: Callable[[Mover], Any]) -> Future[Any]:
        future = Future[Any]()
        self.calls.append(lambda: future.set_result(call(self.mover)))
        return future

    def tell(self, _: Any, call: Callable[[Mover], Any]) -> None:
        call(self.mover)

    def submit(self, call: Callable[[Mover], Any]) -> Future[Any]:
        future = Future[Any]()
        future.set_result(call(self.mover))
        return future

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    def close(self) -> None:
        self.mover.close()


def test_block_tables_may_be_changed_before_the_movers_thread_has_looked_at_them() -> None:
    pair = Pair.of()
    progress = [LateProgress(engine.movers[0]) for engine in (pair.src, pair.dst)]
    cards = Cards("prefill", [pair.src.movers[0].card])
    src, dst = (RequestTransfers(cast(Progress, each), lambda host, port: cards) for each in progress)
    table, more, into = (
        pair.src_tables[0][0][:5].copy(),
        pair.src_tables[0][0][5:].copy(),
        pair.dst_tables[0][0].copy(),
    )
    src.send(SendSpec("p", "request", (), 0), [table], [Gate(None, tokens=20)])
    src.produced("p", Gate(None), [more])
    dst.receive(ReceiveSpec("d", Remote("prefill", "request", "here", 1), 0, pair.tokens, ()), [into])
    while not progress[1].calls:  # whoever is called is called in a thread of its own
        pass
    for given in (table, more, into):
        given[:] = np.arange(0, 64, 2)[: len(given)]
    for each in progress:
        each.run()
    pair.bench.settle(lambda: bool(dst.received()))
    pair.assert_landed()
    src.close()
    dst.close()
