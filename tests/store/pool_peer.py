"""A writer in a process of its own, which dies at a point of its second put: `pool_peer.py LOCATION POINT`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from pool_stores import FaultyClient, open_over
from store_rank import GQA, PAGE, Rank, pages_of

from kvmover.layout import Fleet
from kvmover.store.mooncake.client import PoolClient
from kvmover.store.mooncake.format import PoolAddress

POINTS = ("before the box", "after the box", "in objects", "after objects")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class MortalClient(FaultyClient):
    """Mooncake's client, in a process that dies at the point that it was told."""

    point = ""

    def put(self, key: str, value: bytes, config: Any) -> int:
        if self.point == "before the box":
            die()
        return self.client.put(key, value, config)

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        if self.point == "after the box":
            die()
        if self.point == "in objects":
            self.client.batch_put_session_start(keys, sizes)
            die()
        codes = self.client.batch_put_from(keys, addresses, sizes)
        if self.point == "after objects":
            die()
        return codes


def main(location: str, point: str) -> None:
    joined = PoolClient.open(PoolAddress.parse(location))
    client = MortalClient(joined._client, joined._kept)
    store = open_over(client, prefix=f"test/{point.replace(' ', '-')}")
    Rank.of(store, GQA, Fleet(tp=2, page_tokens=PAGE), 0).put(pages_of(6, "first"))
    client.point = point
    Rank.of(store, GQA, Fleet(tp=4, page_tokens=PAGE), 3).put(pages_of(6, "second"))


if __name__ == "__main__":
    main(*sys.argv[1:])
