"""Processes on one real server: writers that die at every point of a segment, and fleets of unlike shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bucket_peer import POINTS
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.layout import Fleet
from kvmover.store import PageStore, Policy
from kvmover.store.bucket.bucket_objects import BucketObjects
from kvmover.store.bucket.service import ObjectBucket

PEER = Path(__file__).with_name("bucket_peer.py")
ROOT = PEER.parents[2]


def opened(location: str, policy: Policy | None = None) -> PageStore:
    return PageStore(
        SPACE.folder, BucketObjects(ObjectBucket.open(location), SPACE.folder, SPACE.digest, policy or Policy())
    )


def test_a_writer_that_dies_anywhere_leaves_whole_segments_or_none(bucket: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(PEER.parent)))}
    peers = [subprocess.Popen([sys.executable, str(PEER), bucket, point], env=environment) for point in POINTS]
    assert [peer.wait(60) for peer in peers] == [-9] * len(POINTS)
    with opened(bucket) as store:  # a rank of another fleet than the writers
        rank = Rank.of(store, GQA, Fleet(tp=2, page_tokens=PAGE), 1, slots=400)
        for point in POINTS:
            assert all(answer.ok for answer in rank.get(pages_of(6, f"first {point}"))), point
            there = rank.exists(pages_of(400, f"second {point}"))
            assert there == [point == "after head"] * 400
            assert [answer.ok for answer in rank.get(pages_of(400, f"second {point}"))] == there
        assert store.verify().bad == {}
        names = [entry.name for entry in store.objects.catalog.bucket.list(SPACE.folder)]
        assert sum(name.endswith(".data") for name in names) == 6, "one of a dead writer, without a head"


def test_two_fleets_of_unlike_shapes_share_a_bucket(bucket: str) -> None:
    one, other = Fleet(tp=4, page_tokens=PAGE), Fleet(tp=2, pp=2, page_tokens=PAGE)
    pages = pages_of(8)
    for rank in range(4):
        with opened(bucket) as store:
            Rank.of(store, GQA, one, rank).put(pages)
    for rank in range(4):
        with opened(bucket) as store:
            reader = Rank.of(store, GQA, other, rank)
            assert all(reader.exists(pages))
            assert all(answer.ok for answer in reader.get(pages))
