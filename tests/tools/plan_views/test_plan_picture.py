"""The picture of a plan shows every rank, every leg and every share of it, in one file that needs nothing else."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from kvmover.layout import Component
from kvmover.plan import RDMA, Plan, Replicas
from kvmover.plan.explain import explain
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.plan_views import plan_picture, svg

SVG = "{http://www.w3.org/2000/svg}"
LATENT = Component.mla(61, 576, "bfloat16")


def heads(count: int) -> Component:
    return Component.attention(8, count, 128, "bfloat16")


def draw(component: Component, src: str, dst: str, tokens: int = 1024, replicas: Replicas = Replicas.STRIPE) -> str:
    source, target = FleetText.parse(src), FleetText.parse(dst)
    plan = Plan(component, source.fleet, target.fleet, 0, tokens, replicas)
    return plan_picture.draw(plan, source, target, list(explain(plan, source, target, RDMA)))


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)


def boxes(root: ET.Element, colour: str, right: bool) -> list[tuple[float, float]]:
    """(y, width) of what is painted with a colour, in the left or the right half."""
    return [
        (float(box.attrib["y"]), float(box.attrib["width"]))
        for box in root.iter(f"{SVG}rect")
        if box.get("fill") == colour and (float(box.attrib["x"]) > plan_picture.WIDTH / 2) == right
    ]


CASES = {
    "tp8-tp2": (heads(8), "tp=8,page=16", "tp=2,page=64"),
    "tp4-tp8-of-2-heads": (heads(2), "tp=4,page=16", "tp=8,page=64,order=HND"),
    "latent-tp4-tp2": (LATENT, "tp=4,page=16", "tp=2,page=64"),
    "pp2-tp2": (heads(8), "tp=2,pp=2", "tp=2"),
    "pp3-pp2": (heads(4), "tp=2,pp=3", "tp=3,pp=2"),
    "cp": (heads(4), "tp=2,cp=2,page=16", "tp=4,cp=3,cp_order=token,page=64"),
    "cp-blocks": (heads(4), "cp=4,page=16", "tp=2,cp=3,cp_order=block,page=64"),
    "many-heads": (heads(128), "tp=3", "tp=8"),
    "one-token": (heads(8), "tp=4,cp=4", "tp=2"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_leg_is_a_ribbon_with_a_label_and_every_rank_a_card(case: str) -> None:
    component, src, dst = CASES[case]
    tokens = 1 if case == "one-token" else 1024
    source, target = FleetText.parse(src).fleet, FleetText.parse(dst).fleet
    legs = list(Plan(component, source, target, 0, tokens).legs())
    root = parsed(draw(component, src, dst, tokens))
    labels = [text for text in root.iter(f"{SVG}text") if text.get("class") == "label"]
    ribbons = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}path") is not None]
    names = Counter(text.text for text in root.iter(f"{SVG}text") if str(text.text).startswith("rank "))
    assert len(ribbons) == len(labels) == len(legs)
    assert sum(names.values()) == source.size + target.size
    assert [group.findtext(f"{SVG}title", "").split(":")[0] for group in ribbons] == [
        f"{leg.src_rank} to {leg.dst_rank}" for leg in legs
    ]


@pytest.mark.parametrize("case", CASES)
def test_everything_lies_on_the_paper_and_no_label_on_another(case: str) -> None:
    root = parsed(draw(*CASES[case]))
    height = float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        x, y, width, tall = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= plan_picture.WIDTH + 0.01
        assert 0 <= y <= y + tall <= height + 0.01
        assert min(width, tall) > 0
    places = sorted(float(t.attrib["y"]) for t in root.iter(f"{SVG}text") if t.get("class") == "label")
    assert all(high - low >= 11 for low, high in pairwise(places))


@pytest.mark.parametrize("case", CASES)
def test_the_file_needs_nothing_else(case: str) -> None:
    text = draw(*CASES[case])
    assert text.count("http") == 1  # the name of the SVG language itself
    for outside in ("href", "@import", "@font-face", "url(", "<script", "<image"):
        assert outside not in text


def test_a_destination_shows_its_heads_in_the_colour_of_their_sender() -> None:
    root = parsed(draw(heads(8), "tp=8,page=16", "tp=2,page=64"))
    for rank in range(8):
        assert len(boxes(root, svg.colour(rank), right=False)) == 1
        assert len(boxes(root, svg.colour(rank), right=True)) == 1


def test_shared_pages_are_drawn_as_stripes_of_both_senders() -> None:
    root = parsed(draw(LATENT, "tp=4,page=16", "tp=2,page=64", tokens=4096))
    bar = [boxes(root, svg.colour(rank), right=True)[1:] for rank in (0, 1)]
    assert len(bar[0]) == len(bar[1]) == 8
    assert {y for y, _ in bar[0]} == {y for y, _ in bar[1]}
    assert any("Bars: tokens 0-255 of 4,096." in str(text.text) for text in root.iter(f"{SVG}text"))


def test_no_bar_is_drawn_where_every_leg_carries_the_whole_request() -> None:
    assert "Bars:" not in draw(heads(8), "tp=4,page=16", "tp=2,page=64")


def test_what_is_left_to_an_elected_replica_is_pale() -> None:
    pale = draw(LATENT, "tp=4", "tp=2", replicas=Replicas.ELECT)
    assert pale.count('opacity="0.22"') == 2
    assert 'opacity="0.22"' not in draw(heads(8), "tp=4", "tp=2")


def test_layers_are_named_where_pipeline_stages_divide_them() -> None:
    def soft(text: str) -> set[str | None]:
        return {each.text for each in parsed(text).iter(f"{SVG}text") if each.get("class") == "soft"}

    assert {"0-1", "2-3", "4", "5-7"} <= soft(draw(heads(4), "tp=2,pp=3", "tp=3,pp=2"))
    assert "0-7" not in soft(draw(heads(8), "tp=8", "tp=2"))


def test_sources_have_colours_of_their_own() -> None:
    assert len({svg.colour(rank) for rank in range(64)}) == 64


def test_a_rank_without_a_part_of_the_request_says_so() -> None:
    assert draw(heads(4), "cp=4,page=64", "tp=2", tokens=10).count("holds none") == 3


@pytest.mark.parametrize("case", CASES)
def test_every_line_below_the_ranks_ends_inside_of_the_picture(case: str) -> None:
    """Letters of 11 pixels are 5.5 wide on average in the fonts that browsers take."""
    component, src, dst = CASES[case]
    root = parsed(draw(component, src, dst, 8192))
    bottom = float(root.attrib["height"]) - 44
    for text in root.iter(f"{SVG}text"):
        if float(text.attrib["y"]) > bottom:
            wide, x = 5.5 * len(text.text or ""), float(text.attrib["x"])
            assert x - wide >= 0 if text.attrib["text-anchor"] == "end" else x + wide <= plan_picture.WIDTH


#: Fleets of more ranks than anybody looks at one by one, and how many ranks are drawn of each.
LARGE = {
    "tp64-tp8cp8": (heads(8), "tp=64", "tp=8,cp=8", (1, 1)),
    "tp1024-tp64": (heads(8), "tp=1024", "tp=64", (16, 1)),
    "pp8-one": (heads(8), "tp=8,pp=8", "tp=1", (4, 1)),
    "one-latent-tp64": (LATENT, "tp=1", "tp=64", (1, 4)),
    "some-send-nothing": (LATENT, "tp=64,page=64", "tp=1,page=64", (3, 1)),
    "cp-by-token": (heads(8), "tp=8,cp=8", "tp=4,cp=8,cp_order=token", (16, 8)),
}


def ranks_in(text: str) -> set[int]:
    ends = [[int(end) for end in part.split("-")] for part in re.findall(r"\d+-\d+|\d+", text)]
    return {rank for low, *high in ends for rank in range(low, (high or [low])[0] + 1)}


@pytest.mark.parametrize("case", LARGE)
def test_of_a_large_fleet_one_pattern_is_drawn_for_all_that_are_like_it(case: str) -> None:
    component, src, dst, drawn = LARGE[case]
    tokens = 2 * 64 if case == "some-send-nothing" else 8192
    root = parsed(draw(component, src, dst, tokens))
    cards = [t for t in root.iter(f"{SVG}text") if str(t.text).startswith("rank ")]
    left = {int(str(t.text)[5:]) for t in cards if float(t.attrib["x"]) < plan_picture.WIDTH / 2}
    right = {int(str(t.text)[5:]) for t in cards if float(t.attrib["x"]) > plan_picture.WIDTH / 2}
    assert (len(left), len(right)) == drawn
    assert float(root.attrib["height"]) < 2600
    legs = Plan(component, FleetText.parse(src).fleet, FleetText.parse(dst).fleet, 0, tokens).legs()
    ribbons = [group.findtext(f"{SVG}title", "").split(":")[0] for group in root.iter(f"{SVG}g")]
    between = [f"{leg.src_rank} to {leg.dst_rank}" for leg in legs if leg.src_rank in left and leg.dst_rank in right]
    assert sorted(ribbons) == sorted(between)


def test_every_rank_of_a_large_fleet_is_drawn_or_named() -> None:
    for case in ("tp64-tp8cp8", "tp1024-tp64", "pp8-one", "one-latent-tp64"):
        component, src, dst, (left, right) = LARGE[case]
        notes = [str(t.text) for t in parsed(draw(component, src, dst, 8192)).iter(f"{SVG}text")]
        (note,) = [text for text in notes if text.startswith("Not drawn: ")]
        named = note.removeprefix("Not drawn: ").split(", as ")[0]
        sizes = FleetText.parse(src).fleet.size, FleetText.parse(dst).fleet.size
        if named.startswith(("source", "destination")):
            side = int(named.startswith("destination"))
            assert len(ranks_in(named)) + (left, right)[side] == sizes[side]
        else:
            assert tuple(len(ranks_in(part)) for part in named.split(" to ")) == (sizes[0] - left, sizes[1] - right)


@pytest.mark.parametrize("case", LARGE)
def test_what_is_said_of_ranks_that_are_not_drawn_ends_inside_of_the_picture(case: str) -> None:
    root = parsed(draw(*LARGE[case][:3], tokens=8192))
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["y"]) < float(root.attrib["height"])
        if text.attrib["class"] == "ink" and text.attrib["text-anchor"] == "start":
            assert float(text.attrib["x"]) + 5.5 * len(text.text or "") <= plan_picture.WIDTH


def test_fleets_that_can_be_looked_at_are_drawn_whole() -> None:
    text = draw(heads(8), "tp=16", "tp=8")
    assert "Not drawn" not in text
    assert text.count(">rank ") == 24


def test_what_a_drawn_rank_gets_from_ranks_that_are_not_drawn_is_grey() -> None:
    """Of 64 parts of one rank's cache 4 have the colour of a sender."""
    root = parsed(draw(heads(8), "tp=8,pp=8", "tp=1"))
    assert sum(len(boxes(root, svg.colour(rank), right=True)) for rank in range(4)) == 4
    assert len(boxes(root, "#8d96a0", right=True)) == 60
    assert "Grey: sent by ranks that are not drawn." in {t.text for t in root.iter(f"{SVG}text")}
    assert "Grey" not in draw(heads(8), "tp=64", "tp=8,cp=8")
