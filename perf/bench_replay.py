"""Time until a router that starts late has read all KV events, from batch 0, against the same frames over ZeroMQ alone.

A publisher keeps the last 10,000 of its batches, and before them a snapshot of 2,000 prompts of 16 pages. Up to a
million empty batches fill the numbers before it: of 1,500,000 batches a replay begins at about 490,000. llm-d gives up
after 120 s. The bare socket sends the same frames as the reader takes them, without a history.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import zmq

from kvmover.cache.prefix import EventPublisher, PrefixTree
from kvmover.cache.prefix.event_history import END_OF_REPLAY
from perf.command_line import options
from perf.record import interleaved, write

COUNTS = 20_000, 200_000, 1_000_000, 1_500_000
KEPT, PROMPTS, PAGES, PAGE_TOKENS = 10_000, 2_000, 16, 16
#: By how many batches: a million take a minute where others want the cores.
ROUNDS, FEW_ROUNDS, MANY = 3, 1, 500_000


def main() -> None:
    options(__doc__).parse_args()
    rows = [row for count in COUNTS for row in _case(count)]
    for row in rows:
        print(
            f"{row['published']:>9} batches: {row['replayed']:>9} read from {row['first']:>6} on, {row['what']:<17}"
            f" {row['median_s']:>8.2f} s ({row['p10_s']:.2f} to {row['p90_s']:.2f})"
        )
    print(f"wrote {write('replay', rows)}")


def _tree() -> PrefixTree:
    tree = PrefixTree(PAGE_TOKENS, sink=lambda event: None)
    for prompt in range(PROMPTS):
        first = prompt * PAGES * PAGE_TOKENS
        tree.insert(range(first, first + PAGES * PAGE_TOKENS), range(prompt * PAGES, (prompt + 1) * PAGES))
    return tree


def _case(count: int) -> Iterator[dict[str, object]]:
    context = zmq.Context()
    tree = _tree()
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keep_batches=KEPT) as publisher:
        for _ in range(count):
            if publisher.snapshot_due:
                publisher.snapshot(tree.resident())
            publisher.publish(())
        frames = _read(context, publisher.replay_endpoint)
        numbers = [int.from_bytes(number, "big") for number, _ in frames]
        assert numbers[-1] == count - 1, "the last batch is missing"
        assert all(after == before + 1 for before, after in pairwise(numbers)), "a number is missing"
        bare = _Bare(context, frames)
        cases: dict[str, Callable[[], object]] = {
            "kvmover's replay": partial(_read, context, publisher.replay_endpoint),
            "the bare socket": partial(_read, context, bare.endpoint),
        }
        spreads = interleaved(cases, ROUNDS if count < MANY else FEW_ROUNDS)
        bare.close()
    context.term()
    for what, spread in spreads.items():
        yield {
            "published": count,
            "replayed": len(frames),
            "first": numbers[0],
            "megabytes": round(sum(len(payload) for _, payload in frames) / 1e6, 1),
            "what": what,
            "median_s": round(spread.median, 3),
            "p10_s": round(spread.low, 3),
            "p90_s": round(spread.high, 3),
        }


def _read(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> list[tuple[bytes, bytes]]:
    """Ask for everything from batch 0 on, as a router does. Returns number and payload of each."""
    found = list[tuple[bytes, bytes]]()
    with context.socket(zmq.DEALER) as asking:
        asking.set_hwm(0)
        asking.setsockopt(zmq.RCVTIMEO, 120_000)
        asking.connect(endpoint)
        asking.send_multipart((b"", bytes(8)))
        while (frames := asking.recv_multipart())[2] != END_OF_REPLAY:
            found.append((frames[2], frames[3]))
    return found


class _Bare:
    """A socket that answers each asker with the same frames, from a list."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], frames: Sequence[tuple[bytes, bytes]]) -> None:
        self._frames, self._over = frames, threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.set_hwm(64)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._over.is_set():
            if self._socket.poll(50):
                asker = self._socket.recv_multipart()[0]
                for number, payload in self._frames:
                    self._socket.send_multipart((asker, b"", b"", number, payload))
                self._socket.send_multipart((asker, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()


if __name__ == "__main__":
    main()
