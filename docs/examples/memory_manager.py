"""A memory manager with kvmover in it: two ranks prefill, one decodes, a page is stored, and every byte is checked."""

import hashlib
import tempfile
from pathlib import Path

import torch

from kvmover import Component, Fleet, LoopbackNetwork, LoopbackTransport, Model, Mover, Place, Pool, PoolSpec, Transfer
from kvmover.layout import PACKED_ORDER
from kvmover.store import Namespace, PagePart, PageStore
from kvmover.transport import memory_of

kv = Component.attention(layers=2, kv_heads=4, head_dim=64, dtype="bfloat16")
model, network = Model("tiny", (kv,)), LoopbackNetwork()  # NixlTransport("prefill-0") instead: two machines
wide, narrow = Fleet(tp=2, page_tokens=16), Fleet(tp=1, page_tokens=64)


class Rank:
    """One rank's memory: a pool, which of its pages are free, and a mover that has registered it."""

    def __init__(self, engine: str, fleet: Fleet, rank: int, order: str) -> None:
        spec = PoolSpec.dense(kv, fleet.shard(kv, rank, 1), pages=8, page_tokens=fleet.page_tokens, order=order)
        self.pool, self.free = Pool.zeros(spec), set(range(8))
        transport = LoopbackTransport(network, f"{engine}-{rank}")
        self.mover = Mover(transport, model, Place(engine, fleet, rank), [self.pool])

    def give_back(self, transfer: Transfer, pages: list[int]) -> None:
        if transfer.ended and not transfer.quarantined:  # else a write may still land in them: ask again later
            self.free.update(pages)


def planes(pool: Pool) -> list[torch.Tensor]:  # views [page, token, head, dim] of K and V of each layer, as bits
    return [pool.plane(layer, half).view(torch.int16) for layer in range(2) for half in range(2)]


def drive(*transfers: Transfer) -> None:
    while not all(transfer.ended for transfer in transfers):
        [rank.mover.poll() for rank in (*prefill, decode)]


prefill, decode = [Rank("prefill", wide, n, "NHD") for n in range(2)], Rank("decode", narrow, 0, "HND")
truth = torch.randint(-(2**15), 2**15, (4, 64, 4, 64), dtype=torch.int16)  # [plane, token, head, dim]
for n, rank in enumerate(prefill):  # in the place of a forward pass: 64 tokens and this rank's heads, into four pages
    for plane, bits in zip(planes(rank.pool), truth, strict=True):
        plane[[5, 2, 7, 0]] = bits[:, 2 * n : 2 * n + 2].reshape(4, 16, 2, 64)
    decode.mover.connect(rank.mover.card)

wanted = decode.mover.receive("request-1", "prefill", range(64), pages=None)  # a page is named once one is free
decode.mover.allocated(wanted, [[page := decode.free.pop()]])
drive(wanted, *(rank.mover.send("request-1", pages=[[5, 2, 7, 0]]) for rank in prefill))
wanted.landed()  # raises TransferFailed with the reason, if it failed
assert torch.equal(torch.stack([plane[page] for plane in planes(decode.pool)]), truth)

late = decode.mover.receive("request-2", "prefill", range(64), pages=[[other := decode.free.pop()]])  # nobody sends it
decode.mover.abort(late, "the client went away")
drive(late)
decode.give_back(late, [other])
assert late.result is not None
assert late.result.reason == "the client went away"

packed = Pool.zeros(PoolSpec.dense(kv, narrow.shard(kv, 0, 64), 1, 64, PACKED_ORDER))  # a page as the store wants it
name, at = hashlib.sha256(b"these tokens and all before them").digest(), packed.tensors[0].data_ptr()
with tempfile.TemporaryDirectory() as root, PageStore.open(Path(root), Namespace("tiny", "revision-1", 64)) as store:
    store.register(memory_of(packed.tensors[0]))
    view = store.view(Namespace("tiny", "revision-1", 64), PagePart.whole(kv, 64))
    [to.copy_(plane[[page]]) for to, plane in zip(planes(packed), planes(decode.pool), strict=True)]
    assert view.put([name], [at])[0].ok
    assert view.exists([name, bytes(32)]) == [True, False]
    packed.tensors[0].zero_()
    assert view.get([name], [at])[0].ok
assert torch.equal(torch.cat(planes(packed)), truth)
