"""Two processes on one GPU: KV moves between pools of different page size and order over NIXL, by every route."""

from __future__ import annotations

import hashlib
import multiprocessing
from importlib.util import find_spec
from multiprocessing.connection import Connection

import pytest
import torch

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import Route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed"),
]

KV = Component.attention(8, 4, 128, "bfloat16")
TOKENS = 1000
ANSWER_S = 90
SIDES = {"prefill": (Fleet(page_tokens=16), "NHD"), "decode": (Fleet(page_tokens=64), "HND")}
ROUTES = (Route.PACKED, Route.DIRECT, Route.MAPPED)


class End:
    """One process's pool on the GPU, with a mover for each route."""

    def __init__(self, engine: str) -> None:
        from kvmover.transfer.config import Exports, MoverConfig
        from kvmover.transfer.mover import Mover
        from kvmover.transfer.protocol.handshake import Model, Place
        from kvmover.transport.nixl import NixlTransport

        fleet, order = SIDES[engine]
        pages = 2 * (-(-TOKENS // fleet.page_tokens))
        spec = PoolSpec.dense(KV, fleet.shard(KV, 0, TOKENS), pages, fleet.page_tokens, order, ("layer",))
        generator = torch.Generator(device="cuda").manual_seed(len(engine))
        self.pool = Pool(
            spec,
            tuple(
                torch.randint(0, 256, (spec.allocation_bytes,), dtype=torch.uint8, device="cuda", generator=generator)
                for _ in range(spec.allocations)
            ),
        )
        self.pages = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()[: pages // 2]
        self.movers = {
            route: Mover(
                NixlTransport(f"{engine}-{route}"),
                Model("gpu", (KV,)),
                Place(engine, fleet, 0),
                [self.pool],
                MoverConfig(route=route, arena_bytes=32 << 20, exports=Exports.POOLS),
            )
            for route in ROUTES
        }

    def digest(self) -> str:
        """SHA-256 of the request's rows in logical order."""
        positions = torch.arange(TOKENS)
        page_tokens = self.pool.spec.page_tokens
        where = torch.tensor(self.pages)[positions // page_tokens].cuda(), (positions % page_tokens).cuda()
        summed = hashlib.sha256()
        for layer in range(KV.layers):
            for kv in range(KV.kv):
                rows = self.pool.plane(layer, kv)[where].contiguous()
                summed.update(rows.view(torch.uint8).cpu().numpy().tobytes())
        return summed.hexdigest()


def decode(pipe: Connection) -> None:
    """Receive by each route into poisoned pages, and answer with what landed."""
    end = End("decode")
    pipe.send({route: mover.card for route, mover in end.movers.items()})
    cards = pipe.recv()
    for route, mover in end.movers.items():
        mover.connect(cards[route])
    for route in iter(pipe.recv, None):
        for tensor in end.pool.tensors:
            tensor.fill_(0xEE)
        torch.cuda.synchronize()
        transfer = end.movers[route].receive(f"request-{route}", "prefill", range(TOKENS), [end.pages])
        end.movers[route].wait([transfer])
        assert transfer.result is not None
        pipe.send((transfer.result.reason, end.digest()))
    for mover in end.movers.values():
        mover.close()


def test_every_route_lands_the_same_bytes_in_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    from kvmover.transfer.result import Gate

    here, there = context.Pipe()
    process = context.Process(target=decode, args=(there,), daemon=True)
    process.start()
    try:
        end = End("prefill")
        assert here.poll(ANSWER_S), "the other process did not start"
        here.recv()
        here.send({route: mover.card for route, mover in end.movers.items()})
        for route in ROUTES:
            here.send(route)
            produced = torch.cuda.Event()
            produced.record()
            transfer = end.movers[route].send(f"request-{route}", [end.pages], gates=[Gate(produced)])
            end.movers[route].wait([transfer])
            assert here.poll(ANSWER_S), f"no answer on the {route} route"
            reason, digest = here.recv()
            assert reason is None
            assert transfer.landed().routes == (route,)
            assert digest == end.digest()
        here.send(None)
        process.join(30)
        for mover in end.movers.values():
            mover.close()
    finally:
        process.kill()
        process.join()
