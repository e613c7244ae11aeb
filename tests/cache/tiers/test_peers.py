"""Engines of unlike shape read from each other's hosts what they would otherwise compute, or read from storage."""

from __future__ import annotations

import pytest
from peer_rig import LendingEngine, SharedNetwork
from rig import LATENT, PLAIN, SPARSE

from kvmover.layout import Fleet
from kvmover.layout.fleet import CpOrder

PROMPT = list(range(65))
TP4, TP2 = Fleet(tp=4, page_tokens=8), Fleet(tp=2, page_tokens=4)
PP2TP2, CP2 = Fleet(tp=2, pp=2, page_tokens=16), Fleet(cp=2, page_tokens=4)
CP2TP2 = Fleet(tp=2, cp=2, page_tokens=4, cp_order=CpOrder.TOKEN)


@pytest.fixture
def network():
    return SharedNetwork()


@pytest.mark.parametrize("model", [PLAIN, LATENT, SPARSE], ids=["plain", "latent", "sparse"])
@pytest.mark.parametrize(
    ("lender", "borrower"), [(TP4, TP2), (TP2, PP2TP2), (CP2, TP4), (CP2TP2, CP2), (PP2TP2, CP2TP2)]
)
def test_an_engine_of_another_shape_reads_what_a_peer_has_on_its_host(network, model, lender, borrower):
    orders = "layer kv page token head dim", "page head layer kv token dim"
    first = LendingEngine(network, "first", lender, model=model, order=orders[0], pages=(32, 64))
    second = LendingEngine(network, "second", borrower, ["first"], model=model, order=orders[1], pages=(32, 64))
    second.connect(first)
    first.serve(PROMPT)
    for restore in second.serve(PROMPT):
        assert (restore.tokens, restore.credit.peer_tokens, restore.lost) == (64, 64, {})
    first.close()
    second.close()
