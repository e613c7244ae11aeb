"""Fleets are read from one line of text, and plans are written as plain data that adds up."""

from __future__ import annotations

import json
from itertools import product

import pytest

from kvmover.errors import LayoutError
from kvmover.layout import Component, CpOrder, Fleet
from kvmover.plan import RDMA, Plan
from kvmover.plan.explain import explain, plan_as_data
from kvmover.plan.fleet_text import FleetText, component_of, in_our_words

LEG = ("src_rank", "dst_rank", "layers", "heads", "positions", "bytes")
PACKED = "page head layer kv token dim"


@pytest.mark.parametrize(
    ("text", "fleet", "order"),
    [
        ("tp=4,page=16,order=NHD", Fleet(tp=4, page_tokens=16), "NHD"),
        ("tp=2,pp=2,page=64,order=HND", Fleet(tp=2, pp=2), "HND"),
        ("pp=3", Fleet(pp=3), "NHD"),
        (" tp=1 , cp=4 , cp_order=token ", Fleet(cp=4, cp_order=CpOrder.TOKEN), "NHD"),
        ("cp=2,cp_order=block,page=1", Fleet(cp=2, page_tokens=1, cp_order=CpOrder.BLOCK), "NHD"),
        ("order=page-head-layer-kv-token-dim", Fleet(), PACKED.replace(" ", "-")),
        (f"order={PACKED}", Fleet(), PACKED),
        ("page=256,page.swa=64,page.c4=16", Fleet(page_tokens=256, pages={"swa": 64, "c4": 16}), "NHD"),
    ],
    ids=["nhd", "hnd", "defaults", "spaces", "block", "dashes", "words", "own-pages"],
)
def test_a_fleet_is_read_from_text(text: str, fleet: Fleet, order: str) -> None:
    assert FleetText.parse(text) == FleetText(fleet, order)


def test_a_fleet_says_in_which_form_it_stores_the_cache() -> None:
    latent = Component.mla(61, 576, "bfloat16")
    assert FleetText.parse("dtype=fp8_ds_mla").stored(latent).row_bytes == 656
    assert FleetText.parse(in_our_words("vllm --kv-cache-dtype fp8")).stored(latent).row_bytes == 576
    assert FleetText.parse("tp=2").stored(latent) is latent
    index = Component("index", 61, 1, 1, 132, "uint8")
    assert FleetText.parse("dtype=fp8").stored(index) is index
    with pytest.raises(LayoutError, match="unknown dtype 'int4' in 'dtype=int4'; known are auto, fp8"):
        FleetText.parse("dtype=int4")


def test_a_component_is_read_from_text_by_its_fields() -> None:
    compressed = Component("c4", 30, 1, 1, 584, "uint8", row_tokens=4)
    assert component_of("name=c4, layers=30, dim=584, dtype=uint8, row_tokens=4") == compressed
    window = Component.sliding(12, 8, 64, 128, "bfloat16")
    assert component_of("name=sliding,layers=12,kv=2,heads=8,dim=64,dtype=bfloat16,window=128") == window


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name=c4,layers=30,dim=584", "'name=c4,layers=30,dim=584' gives no dtype"),
        ("layers=30,dim=584,dtype=uint8", "gives no name"),
        ("name=c4,layers=x,dim=584,dtype=uint8", "layers = 'x'"),
        ("name=c4,layers=1,layers=2,dim=5,dtype=uint8", "layers is given twice"),
        ("name=c4,rows=4", "unknown word 'rows=4'"),
        ("name=c4,layers=1,dim=5,dtype=bf16", "unknown dtype 'bf16'"),
        ("name=c4,layers=1,dim=5,dtype=uint8,row_tokens=0", "row_tokens = 0; it must be at least 1"),
    ],
)
def test_wrong_fields_of_a_component_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as refused:
        component_of(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=0", "fleet has tp = 0"),
        ("tp=-2", "fleet has tp = -2"),
        ("pp=0", "fleet has pp = 0"),
        ("cp=0", "fleet has cp = 0"),
        ("page=0", "fleet has page_tokens = 0"),
        ("page=-16", "fleet has page_tokens = -16"),
        ("tp=four", "tp = 'four' in 'tp=four' is not a number"),
        ("tp=", "tp = '' in 'tp=' is not a number"),
        ("tp", "tp = '' in 'tp' is not a number"),
        ("tp=1.5", "tp = '1.5'"),
        ("order=NDH", "unknown order 'NDH'"),
        ("order=", "unknown order ''"),
        ("order=layer-kv-page-token-head", "unknown order 'layer-kv-page-token-head'"),
        ("cp_order=ring", "unknown cp_order 'ring' in 'cp_order=ring'; known are page, token, block"),
        (
            "tp=2,dp=2",
            "unknown word 'dp=2' in 'tp=2,dp=2'; known are tp, pp, cp, page, page.COMPONENT, order, cp_order",
        ),
        ("page.c4=0", "a page of c4 has rows = 0"),
        ("page.c4=", "page.c4 = '' in 'page.c4=' is not a number"),
        ("page.=4", "unknown word 'page.=4'"),
        ("page.c4=4,page.c4=8", "page.c4 is given twice"),
        ("", "unknown word ''"),
        ("tp=2,", "unknown word ''"),
        ("TP=2", "unknown word 'TP=2'"),
    ],
)
def test_a_wrong_word_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        FleetText.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_plan_as_data_adds_up(order: str) -> None:
    component = Component.attention(6, 4, 8, "bfloat16")
    plan = Plan(component, Fleet(tp=4, cp=3, page_tokens=16), Fleet(tp=2, pp=2), 0, 40)
    ends = FleetText(plan.src, order), FleetText(plan.dst, order)
    data = json.loads(json.dumps(plan_as_data(plan, list(explain(plan, *ends, RDMA)))))
    assert list(data) == ["src", "dst", "legs", "total_bytes"]
    assert data["total_bytes"] == sum(leg["bytes"] for leg in data["legs"]) == 40 * component.token_bytes
    for side, fleet in (("src", plan.src), ("dst", plan.dst)):
        ranks = data[side]["ranks"]
        assert [rank["rank"] for rank in ranks] == list(range(fleet.size))
        grid = product(range(fleet.pp), range(fleet.cp), range(fleet.tp))
        assert [(rank["pp"], rank["cp"], rank["tp"]) for rank in ranks] == list(grid)
        for rank in ranks:
            assert list(rank) == ["rank", "tp", "pp", "cp", "layers", "heads", "positions"]
            tokens = [
                at + i
                for start, count, step, width in rank["positions"]
                for at in range(start, start + count * step, step)
                for i in range(width)
            ]
            held = fleet.shard(component, rank["rank"], 40).positions
            assert tokens == [position for position in held or () if position < 40]
    for leg in data["legs"]:
        assert list(leg) == [*LEG, "route", "descriptors_direct", "descriptors_packed", "stored_as", "error"]
        tokens = sum(count * width for _, count, _, width in leg["positions"])
        assert leg["bytes"] == leg["layers"][1] * leg["heads"][1] * tokens * component.kv * component.row_bytes
        assert leg["route"] in ("direct", "packed")
        assert leg["descriptors_direct"] >= leg["descriptors_packed"] == 1


def test_a_rank_without_a_position_of_a_short_request_is_an_empty_line_not_an_error() -> None:
    plan = Plan(Component.attention(1, 1, 8, "int8"), Fleet(cp=4, page_tokens=16), Fleet(), 0, 5)
    ranks = plan_as_data(plan, [])["src"]["ranks"]  # pyright: ignore
    assert [rank["positions"] for rank in ranks] == [[[0, 1, 5, 5]], [], [], []]
