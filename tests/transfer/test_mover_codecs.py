"""Engines that store the same numbers in other forms: every byte lands as the definition has it, by consent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mover_codecs import TOLERANT, Stored, Unlike

from kvmover.errors import PeerRefused, PlanError
from kvmover.layout import Codec, Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Integrity
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol.wire import Verb

KV = Component.attention(3, 4, 32, "bfloat16")
LATENT = Component.mla(2, 576, "bfloat16")
FP8, NVFP4 = Codec.fp8("bfloat16", 32), Codec.nvfp4("bfloat16", 32)
PAGES = {"src": Fleet(tp=2, page_tokens=4), "dst": Fleet(tp=4, pp=1, page_tokens=8)}

WIDE = Stored(PAGES["src"], (None,))
CASES = {
    "bf16 to fp8": (KV, WIDE, Stored(PAGES["dst"], (FP8,), "HND", 0.125)),
    "bf16 to fp8, scale 1": (KV, WIDE, Stored(PAGES["dst"], (FP8,))),
    "fp8 to bf16": (KV, Stored(PAGES["dst"], (FP8,), "HND", 0.3), WIDE),
    "fp8 by one scale to fp8 by another": (KV, Stored(PAGES["src"], (FP8,), scale=0.1), Stored(PAGES["dst"], (FP8,))),
    "fp8 by the same scales": (
        KV,
        Stored(PAGES["src"], (FP8,), scale=0.1),
        Stored(Fleet(tp=1, pp=3, page_tokens=4), (FP8,), "HND", 0.1),
    ),
    "bf16 to nvfp4": (KV, WIDE, Stored(PAGES["dst"], (NVFP4,), "HND", 0.01)),
    "nvfp4 to bf16": (KV, Stored(PAGES["dst"], (NVFP4,), "HND", 0.01), WIDE),
    "nvfp4 to fp8": (KV, Stored(PAGES["src"], (NVFP4,), scale=0.02), Stored(PAGES["dst"], (FP8,))),
    "K and V in a row": (
        Component("rows", 2, 1, 4, 64, "bfloat16"),
        WIDE,
        Stored(Fleet(pp=2, page_tokens=8), (Codec.fp8("bfloat16", 32, 32),), "HND", 0.2),
    ),
    "latents to 656 bytes": (LATENT, WIDE, Stored(Fleet(tp=1, page_tokens=16), (Codec.fp8_ds_mla(),))),
    "656 bytes to latents": (LATENT, Stored(Fleet(tp=2, page_tokens=16), (Codec.fp8_ds_mla(),)), WIDE),
    "bf16 to fp16": (KV, WIDE, Stored(PAGES["dst"], (Codec("bfloat16", Codec.plain("float16", 32).parts),))),
}


def narrower(case: str) -> float:
    """Bytes of a row on the wire, by the definition: those of the side that has fewer."""
    meant, src, dst = CASES[case]
    return min(stored.components((meant,))[0].row_bytes for stored in (src, dst))


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("case", CASES)
def test_every_byte_lands_as_the_definition_has_it(case: str, verb: Verb) -> None:
    meant, src, dst = CASES[case]
    pair = Unlike((meant,), src, dst, config=replace(TOLERANT, verb=verb)).connect()
    transfers = [*pair.send(), *pair.receive(start=37)]
    pair.bench.ended(transfers)
    moved = sum(transfer.landed().nbytes for transfer in transfers[: src.fleet.size])
    received = transfers[src.fleet.size :]
    assert moved == sum(transfer.landed().nbytes for transfer in received)
    copies = max(1, dst.fleet.tp // meant.heads)
    assert moved == copies * meant.layers * meant.kv * meant.heads * 63 * narrower(case)
    pair.assert_landed(37)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("case", ["bf16 to fp8", "fp8 to bf16", "latents to 656 bytes"])
@pytest.mark.parametrize("layers", [0, 1])
def test_a_digest_is_of_what_the_wire_carries(case: str, layers: int) -> None:
    meant, src, dst = CASES[case]
    config = replace(TOLERANT, integrity=Integrity.DIGEST, chunk_layers=layers)
    pair = Unlike((meant,), src, dst, config=config).connect()
    pair.bench.ended([*pair.send(), *pair.receive()])
    pair.assert_landed()
    assert not any(mover.meter.counts[Count.MISMATCHED_CHUNKS] for mover in pair.bench.movers)


def test_one_component_is_converted_and_another_in_the_same_chunk_is_not() -> None:
    meant = KV, Component("keys", 2, 1, 1, 24, "uint8")
    src, dst = Stored(PAGES["src"], (None, None)), Stored(PAGES["dst"], (FP8, None), "HND", 0.125)
    pair = Unlike(meant, src, dst, config=replace(TOLERANT, integrity=Integrity.DIGEST)).connect()
    pair.bench.ended([*pair.send(), *pair.receive()])
    pair.assert_landed()


def test_peers_of_unlike_forms_are_refused_without_consent_and_both_forms_and_the_error_are_named() -> None:
    meant, src, dst = CASES["bf16 to fp8"]
    pair = Unlike((meant,), src, dst, config=replace(TOLERANT, lossy=0.05))
    stored = "stores attention as 32 bfloat16, this side as 32 float8_e4m3fn"
    with pytest.raises(PeerRefused, match=f"{stored}: .* off by 0.0625 .*lossy = 0.05 tolerates no more"):
        pair.dst.movers[0].connect(pair.src.movers[0].card)
    pair.bench.turn()
    assert not pair.src.movers[0].ranks("decode")


def test_a_peer_that_consents_is_refused_by_one_that_does_not() -> None:
    meant, src, dst = CASES["bf16 to fp8"]
    pair = Unlike((meant,), src, dst)
    pair.src.movers[0].configure(replace(TOLERANT, lossy=0.0))
    pair.dst.movers[0].connect(pair.src.movers[0].card)
    pair.bench.turn()
    assert pair.src.movers[0].meter.refused.total() == 1
    assert not pair.src.movers[0].ranks("decode")


def test_the_same_form_by_the_same_scales_takes_no_consent_and_any_route() -> None:
    meant, src, dst = CASES["fp8 by the same scales"]
    pair = Unlike((meant,), src, dst, config=replace(TOLERANT, lossy=0.0, route=Route.DIRECT)).connect()
    received = pair.receive()
    pair.bench.ended([*pair.send(), *received])
    assert {route for transfer in received for route in transfer.landed().routes} == {Route.DIRECT}
    pair.assert_landed()


def test_numbers_that_are_meant_to_be_others_are_another_model() -> None:
    halves = replace(KV, dtype="float16")
    pair = Unlike((KV,), WIDE, WIDE)
    other = Unlike((halves,), WIDE, WIDE)
    with pytest.raises(PeerRefused, match="32 float16.*this side holds.*32 bfloat16"):
        pair.dst.movers[0].connect(other.src.movers[0].card)


@pytest.mark.parametrize("route", [Route.DIRECT, Route.MAPPED])
def test_a_route_that_does_not_convert_is_refused_with_both_forms(route: Route) -> None:
    meant, src, dst = CASES["bf16 to fp8"]
    pair = Unlike((meant,), src, dst, config=replace(TOLERANT, route=route)).connect()
    stored = "attention is stored as 32 bfloat16 at the source and 32 float8_e4m3fn at the destination"
    with pytest.raises(PlanError, match=f"route = {route.value}, but {stored}: only the packed route converts"):
        pair.receive()


def test_costs_never_choose_a_route_that_does_not_convert() -> None:
    meant, src, dst = CASES["bf16 to fp8"]
    cheap = replace(TOLERANT.costs, descriptor_us=1e-6)
    pair = Unlike((meant,), src, dst, config=replace(TOLERANT, route=None, costs=cheap)).connect()
    received = pair.receive()
    pair.bench.ended([*pair.send(), *received])
    assert {route for transfer in received for route in transfer.landed().routes} == {Route.PACKED}
    pair.assert_landed()
