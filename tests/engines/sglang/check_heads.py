"""Who sends which heads to whom: SGLang's closed formula and our plan agree where it is right, and where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import bench  # noqa: F401  imports the engine without torchvision
import pytest

from kvmover.layout import Component, Fleet, Span
from kvmover.plan import Plan, Replicas

slices: Any = import_module("sglang.srt.disaggregation.common.staging_buffer").compute_head_slice_params
nixl: Any = import_module("sglang.srt.disaggregation.nixl.conn").NixlKVManager

SIZES = (1, 2, 4, 8, 16)
PAIRS = [(heads, src, dst) for heads, src, dst in product(SIZES, SIZES, SIZES) if src != dst]


def sources(src: int, dst: int, rank: int) -> range:
    """Ranks that SGLang lets `rank` receive from (its `common/conn.py`)."""
    if src > dst:
        return range(rank * src // dst, (rank + 1) * src // dst)
    return range(rank // (dst // src), rank // (dst // src) + 1)


def theirs(heads: int, src: int, dst: int) -> Iterator[tuple[int, int, Span, Span]]:
    """(source, destination, heads by the source's numbers, by the destination's), whole-model numbers both."""
    for rank in range(dst):
        for source in sources(src, dst, rank):
            src_start, count, dst_start, _ = slices(src, dst, source, rank, heads)
            held, wanted = Span.share(heads, src, source), Span.share(heads, dst, rank)
            yield source, rank, Span(held.start + src_start, count), Span(wanted.start + dst_start, count)


def test_both_ends_of_every_slice_are_the_same_heads_and_those_of_our_plan() -> None:
    checked = 0
    for heads, src, dst in PAIRS:
        component = Component.attention(1, heads, 16, "bfloat16")
        for source, rank, sent, landed in theirs(heads, src, dst):
            ours = Span.share(heads, src, source) & Span.share(heads, dst, rank)
            assert sent == landed == ours, (heads, src, dst, source, rank)
            checked += 1
        plan = Plan(component, Fleet(tp=src), Fleet(tp=dst), 0, 64, Replicas.ELECT)
        received = {rank: {head for leg in plan.legs_into(rank) for head in leg.heads} for rank in range(dst)}
        assert received == {rank: set(Span.share(heads, dst, rank)) for rank in range(dst)}
    assert checked > 500


def test_of_sources_that_hold_the_same_heads_all_send_there_and_one_sends_here() -> None:
    """8 ranks that hold 4 heads twice, to 2: SGLang writes everything two times."""
    component = Component.attention(1, 4, 16, "bfloat16")
    for heads, src, dst in PAIRS:
        component = Component.attention(1, heads, 16, "bfloat16")
        plan = Plan(component, Fleet(tp=src), Fleet(tp=dst), 0, 64, Replicas.ELECT)
        mine = sum(leg.heads.count for leg in plan.legs())
        sent = sum(sent.count for _, _, sent, _ in theirs(heads, src, dst))
        assert mine == dst * max(1, heads // dst)
        assert sent == mine * max(1, src // max(heads, dst)) if src > dst else sent == mine
    assert sum(sent.count for _, _, sent, _ in theirs(4, 8, 2)) == 8


def prepare(heads: int, src: int, dst: int) -> None:
    """What rank 0 of a prefill does about rank 0 of a decode, up to where pointers are looked at."""
    item = 2 * 64 * 16

    def pointers(*_: Any) -> Any:
        raise InterruptedError

    arguments = SimpleNamespace(
        page_size=64, total_kv_head_num=heads, kv_head_num=max(1, heads // src), engine_rank=0, kv_data_ptrs=[]
    )
    arguments.kv_item_lens = [item * max(1, heads // src)]
    decode = SimpleNamespace(
        decode_tp_size=dst, decode_tp_rank=0, dst_kv_item_len=item * max(1, heads // dst), dst_kv_ptrs=[]
    )
    mine = SimpleNamespace(attn_tp_size=src, kv_args=arguments, get_mha_kv_ptrs_with_pp=pointers)
    nixl._init_hetero_tp_prep_handle(mine, "peer", decode)


@pytest.mark.parametrize(("heads", "src", "dst"), [(8, 2, 4), (8, 4, 2), (4, 2, 16), (8, 16, 4)])
def test_the_engines_own_transfer_takes_the_pairs_that_it_understands(heads: int, src: int, dst: int) -> None:
    with pytest.raises(InterruptedError):
        prepare(heads, src, dst)


@pytest.mark.parametrize(("heads", "src", "dst"), [(4, 8, 16), (2, 4, 8), (1, 2, 4)])
def test_fewer_heads_than_sources_than_destinations_stop_the_engines_own_transfer_and_not_ours(
    heads: int, src: int, dst: int
) -> None:
    """It counts 0 groups of heads a source there, and the assertion ends the thread that greets peers (0.5.23)."""
    with pytest.raises(AssertionError):
        prepare(heads, src, dst)
    plan = Plan(Component.attention(1, heads, 16, "bfloat16"), Fleet(tp=src), Fleet(tp=dst), 0, 64)
    for rank in range(dst):
        assert {head for leg in plan.legs_into(rank) for head in leg.heads} == {rank * heads // dst}
