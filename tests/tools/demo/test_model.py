"""The demo's model says the same however it is sharded and wherever its rows lie, and not if a row is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage] (public by its docs)

from kvmover.errors import LayoutError
from kvmover.tools.demo.model import (
    GQA,
    LATENT,
    Alone,
    ContiguousCache,
    Gloo,
    ModelConfig,
    ModelShard,
    PagedCache,
    Transformer,
    generate_alone,
)

NHD = "layer kv page token head dim"
HND = "layer kv page head token dim"
PAGE_FIRST = "page layer kv token head dim"
WIRE = "page head layer kv token dim"
PROMPT = random.Random(7).choices(range(512), k=75)
ANSWER = 12
#: The same model on another sharding or in another place of memory: how far a logit gap may move.
TOLERANCE = 1e-9


pytestmark = pytest.mark.usefixtures("one_thread")


def alone(config: ModelConfig) -> Transformer:
    return Transformer(config, ModelShard.of_rank(config, 1, 1, 0, 0), Alone())


def paged(config: ModelConfig, shard: ModelShard, order: str, page_tokens: int) -> PagedCache:
    """A request's cache in a pool of this axis order, its pages in no order, everything unwritten NaN."""
    pages = -(-(len(PROMPT) + ANSWER) // page_tokens)
    sizes = {"layer": len(shard.layers), "kv": config.kv, "head": len(shard.kv_heads), "dim": config.head_dim}
    sizes |= {"page": pages + 3, "token": page_tokens}
    axes = order.split()
    pool = torch.full([sizes[axis] for axis in axes], torch.nan, dtype=torch.float64)
    view = pool.permute([axes.index(axis) for axis in ("layer", "page", "token", "kv", "head", "dim")])
    page_ids = random.Random(1).sample(range(pages + 3), pages)
    return PagedCache(dict(zip(shard.layers, view, strict=True)), page_ids, page_tokens)


@dataclass(frozen=True)
class Fleet:
    config: ModelConfig
    ranks: Sequence[int]
    tp: int
    order: str = NHD
    page_tokens: int = 16


FLEETS = {
    "tp2": Fleet(GQA, (0, 1), 2),
    "tp2-on-other-ranks": Fleet(GQA, (3, 1), 2, HND, 7),
    "tp4-with-2-kv-heads": Fleet(GQA, range(4), 4, WIRE, 8),
    "pp2-tp2": Fleet(GQA, range(4), 2, PAGE_FIRST, 32),
    "pp3-of-4-layers": Fleet(GQA, range(3), 1),
    "latent-tp4": Fleet(LATENT, range(4), 4, HND, 5),
    "latent-pp2-tp2": Fleet(LATENT, range(4), 2),
}


def run_rank(rank: int, folder: Path) -> None:
    """One rank of the world: its part in every fleet it belongs to, and what it heard from it."""
    torch.set_num_threads(1)  # which each thread of Python has a number of its own of
    store = FileStore(f"{folder}/store", 4)
    for name, fleet in FLEETS.items():
        if rank not in fleet.ranks:
            continue
        place, pp = fleet.ranks.index(rank), len(fleet.ranks) // fleet.tp
        shard = ModelShard.of_rank(fleet.config, fleet.tp, pp, place % fleet.tp, place // fleet.tp)
        model = Transformer(fleet.config, shard, Gloo.join(PrefixStore(name, store), place, fleet.tp, pp))
        cache = paged(fleet.config, shard, fleet.order, fleet.page_tokens)
        model.prefill(PROMPT[:40], cache)
        answer = model.generate(PROMPT, ANSWER, cache, start=40)
        (folder / f"{name}.{rank}").write_text(json.dumps([answer, model.gaps[1:]]))


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which four ranks left what they heard in every fleet, over sockets. Each is a thread: processes, as
    the demo's are, take seconds to start."""
    folder = tmp_path_factory.mktemp("fleets")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        list(threads.map(run_rank, range(4), [folder] * 4))
    return folder


@pytest.mark.parametrize("name", FLEETS)
def test_every_rank_of_a_fleet_hears_what_one_process_says(heard: Path, name: str) -> None:
    model = alone(FLEETS[name].config)
    expected = model.generate(PROMPT, ANSWER, ContiguousCache())
    for rank in FLEETS[name].ranks:
        answer, gaps = json.loads((heard / f"{name}.{rank}").read_text())
        assert answer == expected
        assert gaps == pytest.approx(model.gaps, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("config", [GQA, LATENT], ids=lambda config: config.name)
@pytest.mark.parametrize("order", [NHD, HND, PAGE_FIRST, WIRE])
@pytest.mark.parametrize("page_tokens", [1, 7, 64])
def test_a_paged_cache_in_any_order_and_page_size_gives_the_same_tokens(
    config: ModelConfig, order: str, page_tokens: int
) -> None:
    model = alone(config)
    cache = paged(config, model.shard, order, page_tokens)
    assert model.generate(PROMPT, ANSWER, cache) == generate_alone(config, PROMPT, ANSWER)


def test_keys_and_values_may_lie_in_separate_allocations() -> None:
    model = alone(GQA)
    one = paged(GQA, model.shard, NHD, 8)
    size = (max(one.page_ids) + 1, 8, GQA.kv_heads, GQA.head_dim)
    separate = {layer: [torch.zeros(size, dtype=torch.float64) for _ in range(2)] for layer in model.shard.layers}
    two = PagedCache(separate, one.page_ids, 8)
    assert model.generate(PROMPT, ANSWER, two) == model.generate(PROMPT, ANSWER, one)


def test_rows_moved_to_another_pool_go_on_where_the_first_one_ended() -> None:
    model = alone(GQA)
    source, target = paged(GQA, model.shard, NHD, 16), paged(GQA, model.shard, WIRE, 5)
    answer = [model.prefill(PROMPT, source)]
    for layer in model.shard.layers:
        target.write(layer, range(len(PROMPT)), source.read(layer, len(PROMPT)))
    while len(answer) < ANSWER:
        answer.append(model.decode(answer[-1], len(PROMPT) + len(answer) - 1, target))
    assert answer == generate_alone(GQA, PROMPT, ANSWER)


def damaged(
    config: ModelConfig, layer: int, element: tuple[int, int, int, int], by: float
) -> tuple[list[int], list[float]]:
    """What is said after one element [kv, token, head, dim] of one layer's rows moved `by` this much after prefill."""
    model, cache = alone(config), ContiguousCache()
    answer = [model.prefill(PROMPT, cache)]
    cache.rows[layer][element] += by
    while len(answer) < ANSWER:
        answer.append(model.decode(answer[-1], len(PROMPT) + len(answer) - 1, cache))
    return answer, model.gaps


@pytest.mark.parametrize("config", [GQA, LATENT], ids=lambda config: config.name)
def test_one_wrong_element_changes_the_answer(config: ModelConfig) -> None:
    assert damaged(config, 0, (0, 50, 0, 3), by=0.0)[0] == generate_alone(config, PROMPT, ANSWER)
    assert damaged(config, 0, (0, 50, 0, 3), by=30.0)[0] != generate_alone(config, PROMPT, ANSWER)


@pytest.mark.parametrize("config", [GQA, LATENT], ids=lambda config: config.name)
def test_a_wrong_element_anywhere_moves_a_gap_even_where_the_text_stays(config: ModelConfig) -> None:
    rng = random.Random(3)
    _, gaps = damaged(config, 0, (0, 0, 0, 0), by=0.0)
    for _ in range(12):
        element = (rng.randrange(config.kv), rng.randrange(75), rng.randrange(config.kv_heads), rng.randrange(16))
        _, moved = damaged(config, rng.randrange(config.layers), element, by=0.5)
        assert max(abs(now - before) for now, before in zip(moved, gaps, strict=True)) > 10 * TOLERANCE


def test_rows_in_the_wrong_place_of_the_page_table_change_the_answer() -> None:
    model = alone(GQA)
    cache = paged(GQA, model.shard, NHD, 16)
    answer = [model.prefill(PROMPT, cache)]
    cache.page_ids[0], cache.page_ids[1] = cache.page_ids[1], cache.page_ids[0]
    while len(answer) < ANSWER:
        answer.append(model.decode(answer[-1], len(PROMPT) + len(answer) - 1, cache))
    assert answer != generate_alone(GQA, PROMPT, ANSWER)


@pytest.mark.parametrize("config", [GQA, LATENT, replace(GQA, name="gqa-1", seed=1)], ids=lambda config: config.name)
def test_answers_are_varied_and_never_a_near_tie(config: ModelConfig) -> None:
    model = alone(config)
    answers = [model.generate([*PROMPT[:20], word], 24, ContiguousCache()) for word in range(6)]
    assert min(model.gaps) > 1000 * TOLERANCE
    assert all(len(set(answer)) > 12 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == 6


def test_more_tokens_than_the_page_table_holds_are_refused() -> None:
    cache = PagedCache({0: torch.zeros(4, 8, 2, 1, 4)}, [2, 0], 8)
    with pytest.raises(LayoutError, match="17 tokens do not fit 2 pages of 8"):
        cache.write(0, range(16, 17), torch.zeros(2, 1, 1, 4))


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match="TP3"):
        ModelShard.of_rank(GQA, 3, 1, 0, 0)
    with pytest.raises(LayoutError, match="PP5"):
        ModelShard.of_rank(GQA, 1, 5, 0, 0)
    with pytest.raises(LayoutError, match=r"range\(1, 2\)"):
        Transformer(GQA, ModelShard(range(4), range(1, 2), range(4), range(64)), Alone())
    with pytest.raises(LayoutError, match="head_dim 15"):
        replace(GQA, head_dim=15)
    with pytest.raises(LayoutError, match="evenly"):
        replace(GQA, kv_heads=3)
    with pytest.raises(LayoutError, match="no previous stage"):
        Transformer(GQA, ModelShard.of_rank(GQA, 1, 2, 0, 1), Alone()).prefill([1], ContiguousCache())
    with pytest.raises(LayoutError, match="nothing to compute of 3 tokens"):
        alone(GQA).prefill([1, 2, 3], ContiguousCache(), start=3)
