"""A running request moves from TP2 to TP1 while it decodes: both engines in one process, every row compared."""

import torch

from kvmover import Component, Fleet, Model, Mover, Place, Pool, PoolSpec
from kvmover.migrate import ArrivalPhase, ArrivingRank, Checkpoint, DepartingRank, DeparturePhase, Migration, Party
from kvmover.transport import LoopbackNetwork, LoopbackTransport

kv = Component.attention(layers=2, kv_heads=4, head_dim=64, dtype="bfloat16")
network, wide, narrow = LoopbackNetwork(), Fleet(tp=2, page_tokens=16), Fleet(tp=1, page_tokens=64)


class Agreement:
    """Ranks of one thread agree a call late. Ranks of several processes take `Grouped` of kvmover.cache.tiers."""

    def __init__(self, ranks):
        self.ranks, self.rows = ranks, []

    def minimum(self, row):
        self.rows.append(torch.as_tensor(row))
        whole = (len(self.rows) - 1) // self.ranks * self.ranks
        return torch.stack(self.rows[whole - self.ranks : whole]).amin(0).numpy() if whole else None


def rank_of(engine, fleet, rank, order):
    spec = PoolSpec.dense(kv, fleet.shard(kv, rank, 1), 16, fleet.page_tokens, order)
    pool, place = Pool.zeros(spec), Place(engine, fleet, rank)
    return Mover(LoopbackTransport(network, f"{engine}-{rank}"), Model("tiny", (kv,)), place, [pool]), pool


old, (new, landed) = [rank_of("old", wide, rank, "NHD") for rank in range(2)], rank_of("new", narrow, 0, "HND")
movers = [new, *(mover for mover, _ in old)]
for mover, _ in old:
    new.connect(mover.card)
while not all(mover.ranks("new") for mover, _ in old):
    new.poll(), [mover.poll() for mover, _ in old]

tokens, pages, own_pages = 40, [*range(16)], [5, 9]


def write(token):  # one decode step: K and V of a token, in every layer, the heads of each rank
    for rank, (_, pool) in enumerate(old):
        for layer in range(2):
            for plane in range(2):
                pool.plane(layer, plane)[pages[token // 16], token % 16] = token + rank


[write(token) for token in range(tokens)]
migration = Migration("r7", 1, Party("old", 2), Party("new", 1), tokens, payload=b"40")
now, agree = Checkpoint(tokens, [pages[:3]], b"40"), Agreement(2)
leaving = [DepartingRank(mover, migration, now, agree=agree) for mover, _ in old]
coming = ArrivingRank(new, Migration.decode(migration.encode()), [own_pages[:1]])  # a page for the first 40 tokens

while not (coming.settled and all(each.settled for each in leaving)):
    if leaving[0].may_write:
        write(tokens)
        tokens += 1
        for each in leaving:
            each.wrote(Checkpoint(tokens, [pages[: -(-tokens // 16)]], str(tokens).encode()))
    [mover.poll() for mover in movers]
    [each.poll() for each in (*leaving, coming)]
    if coming.pages_for:
        coming.allocated(128, [own_pages])

assert {each.phase for each in leaving} == {DeparturePhase.GONE}
assert coming.phase is ArrivalPhase.HERE
assert coming.landed_tokens == int(coming.payload) == tokens > 40
for token in range(tokens):
    row = landed.plane(1, 1)[own_pages[token // 64], token % 64]
    assert row[:2].eq(token).all()
    assert row[2:].eq(token + 1).all()
