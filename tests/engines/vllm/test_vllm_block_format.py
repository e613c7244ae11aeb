"""Block formats without vLLM: where parts of a page begin, and what is refused."""

from __future__ import annotations

import pytest

from kvmover.engines.common import EngineUnsupported
from kvmover.engines.vllm.block_format import (
    BlockScaled,
    PageView,
    PlanarRows,
    RecurrentKind,
    Rows,
    states_of,
)

KEYS = PlanarRows((("keys", 128), ("scales", 4)), rows=64)


def test_scales_of_a_page_begin_behind_all_its_keys() -> None:
    keys, scales = KEYS.segments(PageView(1, 64, 132, (64 * 132, 132, 1), "uint8"))
    assert (keys.start_bytes, keys.dim, keys.strides) == (0, 128, (0, 128, 128))
    assert (scales.start_bytes, scales.dim, scales.strides) == (8192, 4, (0, 4, 4))


def test_nvfp4_has_two_planes_of_values_and_two_of_scales() -> None:
    values, scales = BlockScaled(2).segments(PageView(4, 16, 72, (16 * 72, 72, 1), "uint8"))
    assert [(each.start_bytes, each.strides[0], each.kv) for each in (values, scales)] == [
        (0, 2304, 2),
        (2048, 2304, 2),
    ]
    assert (values.strides[1:], scales.strides[1:]) == ((1024, 64), (128, 8))


def test_a_convolution_is_a_part_a_projection_whose_heads_are_split_on_their_own() -> None:
    """Of 4 key heads of 6 and 8 value heads of 5 channels, half on this rank: 12 + 12 + 20 channels, 3 steps each."""
    shapes = ((44, 3), (4, 5, 6))
    of_channels = states_of(RecurrentKind("GDN_ATTN", shapes, ("bfloat16", "float32"), 2, steps_first=False))
    page = PageView(1, 1, 44 * 3 * 2 + 4 * 5 * 6 * 4, (0, 0, 1), "int8")
    assert [
        (each.name, each.heads, each.held, each.kv, each.dim, each.start_bytes) for each in of_channels.segments(page)
    ] == [
        ("q", 4, 2, 1, 18, 0),
        ("k", 4, 2, 1, 18, 72),
        ("v", 8, 4, 1, 15, 144),
        ("state", 8, 4, 1, 30, 264),
    ]
    turned = ((3, 44), (4, 5, 6))
    of_steps = states_of(RecurrentKind("GDN_ATTN", turned, ("bfloat16", "float32"), 2, steps_first=True))
    assert [(each.kv, each.dim, each.start_bytes, each.strides[0]) for each in of_steps.segments(page)] == [
        (3, 6, 0, 44),
        (3, 6, 24, 44),
        (3, 5, 48, 44),
        (1, 30, 264, 0),
    ]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (RecurrentKind("RWKV", ((4, 8),), ("float32",), 1, False), "recurrent layers of kind RWKV; those of MAMBA1"),
        (RecurrentKind("LINEAR", ((4, 8), (4, 8)), ("float32",) * 2, 1, False), "kind LINEAR with 2 states"),
        (
            RecurrentKind("GDN_ATTN", ((45, 3), (4, 5, 6)), ("float32",) * 2, 2, False),
            r"shape \(45, 3\) is not of q 12 \+ k 12 \+ v 20 channels",
        ),
    ],
    ids=["kind", "number", "channels"],
)
def test_states_of_shapes_that_are_not_known_are_refused(said: RecurrentKind, message: str) -> None:
    with pytest.raises(EngineUnsupported, match=message):
        states_of(said)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (PageView(1, 128, 132, (128 * 132, 132, 1), "uint8"), "1 x 128 rows, a row every 132 B; .* have 1 x 64"),
        (PageView(1, 64, 132, (64 * 136, 136, 1), "uint8"), "a row every 136 B"),
        (PageView(1, 64, 66, (64 * 66, 66, 1), "bfloat16"), "66 elements of bfloat16; 132 bytes were expected"),
    ],
    ids=["rows", "gaps", "dtype"],
)
def test_pages_that_are_not_of_their_format_are_refused(page: PageView, message: str) -> None:
    with pytest.raises(EngineUnsupported, match=message):
        KEYS.segments(page)


def test_bytes_are_named_by_what_they_stand_for_and_wider_elements_are_not() -> None:
    page = PageView(2, 16, 64, (1024, 64, 1), "uint8")
    (of_bytes,) = Rows(4, "fp8_e5m2").segments(page)
    (wide,) = Rows(4, "auto").segments(PageView(2, 16, 64, (1024, 64, 1), "bfloat16"))
    assert (of_bytes.name, wide.name) == ("fp8_e5m2", "")
