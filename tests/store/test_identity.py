"""Digests of namespaces: everything counts, nothing is joined, and no rank comes into it."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from kvmover.errors import LayoutError, StoreError
from kvmover.layout import Component, CpOrder, Fleet, Span, Stripe
from kvmover.store import Namespace, PageBox, PagePart
from kvmover.store.manifest import decode_manifest, encode_manifest

SPACE = Namespace("llama", "rev-1", 64)
GQA = Component.attention(80, 8, 128, "bfloat16")


def test_every_field_of_a_namespace_and_of_a_component_counts() -> None:
    spaces = [
        SPACE,
        replace(SPACE, model="llama2"),
        replace(SPACE, weights="rev-2"),
        replace(SPACE, page_tokens=32),
        replace(SPACE, salt="tenant"),
    ]
    components = [
        GQA,
        replace(GQA, name="draft"),
        replace(GQA, layers=81),
        replace(GQA, heads=4),
        replace(GQA, dim=64),
        replace(GQA, kv=1),
        replace(GQA, dtype="float16"),
        replace(GQA, states=1),
        replace(GQA, row_tokens=2),
        replace(GQA, row_tokens=4),
    ]
    assert len({space.digest for space in spaces}) == len({space.folder for space in spaces}) == len(spaces)
    digests = {space.digest_for(component) for space in spaces for component in components}
    assert len(digests) == len(spaces) * len(components)


def test_fields_are_never_joined() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("a'", "b"), ("a", "'b")]
    assert len({Namespace(model, weights, 64).digest for model, weights in pairs}) == len(pairs)


def test_a_digest_is_known_for_ever() -> None:
    """A store on disk outlives the process that wrote it: this value may change only with the format."""
    assert Namespace("m", "w", 64).digest.hex() == KNOWN
    assert Namespace("m", "w", 64).folder == KNOWN[:32]


KNOWN = "ec41f606af7f7a3f909d356046a24d3831e122775d52268050422f72ab6c3d7a"


def test_the_digest_of_a_component_names_its_rows_only_where_they_are_of_several_tokens() -> None:
    """Objects of a store that was written before rows had sizes keep their names."""

    def named(**fields: object) -> str:
        whole = sha256(b"kvmover-store-v1")
        of_space = {"model": "m", "weights": "w", "page_tokens": 64, "salt": "", "order": SPACE.order}
        for text in (str(each) for pair in (of_space | fields).items() for each in pair):
            whole.update(len(text).to_bytes(8, "little") + text.encode())
        return whole.hexdigest()

    fields = {"name": "kv", "layers": 2, "kv": 1, "heads": 1, "dim": 8, "dtype": "uint8", "states": 0}
    for row_tokens, rows in ((1, {}), (2, {"row_tokens": 2}), (4, {"row_tokens": 4})):
        digest = Namespace("m", "w", 64).digest_for(Component("kv", 2, 1, 1, 8, "uint8", row_tokens=row_tokens))
        assert digest.hex() == named(**fields, **rows)


def test_what_people_call_weights_is_written_down_and_is_no_part_of_the_namespace() -> None:
    here, there = (Namespace("", "7" * 64, 64, hint=path) for path in ("/models/here", "/models/there"))
    assert here == there
    assert here.digest == there.digest == Namespace("", "7" * 64, 64).digest
    manifest = decode_manifest(encode_manifest(here), here.folder)
    assert manifest is not None
    assert (manifest.model, manifest.weights) == ("/models/here", "7" * 64)


def test_only_the_packed_order_is_written() -> None:
    with pytest.raises(StoreError, match="order 'NHD'"):
        replace(SPACE, order="NHD")
    with pytest.raises(StoreError, match="page of 0 tokens"):
        replace(SPACE, page_tokens=0)
    assert replace(SPACE, page_tokens=1).page_tokens == 1


def test_a_part_has_the_bytes_that_its_box_says() -> None:
    part = PagePart.of(GQA, Fleet(tp=8).shard(GQA, 3, 64), 64)
    assert part is not None
    assert (part.nbytes, part.cell_bytes, part.box.cells) == (2_621_440, 32_768, 80)
    assert part.box == PageBox(Span(3, 1), Span(0, 80), Stripe(0, 1, 64, 64))


def test_a_part_outside_its_component_is_refused() -> None:
    page = Stripe(0, 1, 64, 64)
    with pytest.raises(LayoutError, match="outside the 8"):
        PagePart(GQA, PageBox(Span(7, 2), Span(0, 80), page))
    with pytest.raises(LayoutError, match="not a range"):
        PageBox(Span(0, 2, 2), Span(0, 80), page)
    with pytest.raises(LayoutError, match="outside a page of 64"):
        PagePart(GQA, PageBox(Span(0, 1), Span(0, 80), Stripe(0, 1, 65, 65))).key(SPACE)


def test_a_rank_without_tokens_of_a_page_has_no_part() -> None:
    fleet = Fleet(cp=2, page_tokens=64)
    held = [[PagePart.of(GQA, fleet.shard(GQA, rank, 256), 64, page) for page in range(4)] for rank in range(2)]
    assert [[part is not None for part in row] for row in held] == [
        [True, False, True, False],
        [False, True, False, True],
    ]


def test_a_context_parallel_rank_of_single_tokens_holds_a_stripe_of_each_page() -> None:
    fleet = Fleet(cp=2, page_tokens=64, cp_order=CpOrder.TOKEN)
    part = PagePart.of(GQA, fleet.shard(GQA, 1, 256), 64, 2)
    assert part is not None
    assert part.box.tokens == Stripe(1, 32, 2, 1)
