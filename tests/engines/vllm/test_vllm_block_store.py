"""Blocks of vLLM's caches through the page store, without vLLM: any layout and rank to any other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvmover.config.settings import StoreSettings
from kvmover.engines.common import ParallelRank
from kvmover.engines.vllm.block_store import BlockStore, OffloadWorker, StoredBlockEvents, StoreLookup, page_of
from kvmover.engines.vllm.caches import CacheGroup, ComponentCache, LayerCache, ModelTotals, component_caches
from kvmover.engines.vllm.connector_metadata import LoadSpec, SaveSpec
from kvmover.store import Namespace, PagePart

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 4, 8, 10
NAMES = tuple(f"layers.{n}" for n in range(LAYERS))
SPACE = Namespace("model", "", TOKENS)
HASHES = tuple(page_of(f"block {n}".encode()) for n in range(4))
POISON = 0x6B6B


class Passed:
    """What was saved had been computed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """At once."""


class Never(Passed):
    """A device that failed."""

    def synchronize(self) -> None:
        raise RuntimeError("the device is gone")


class Rank:
    """`cache` [layer, block, head, token, content], whatever lies beneath."""

    def __init__(self, root: Path, layout: str, tp: int, rank: int, kind: str = "full_attention") -> None:
        heads = 1 if kind == "mla_attention" else max(1, HEADS // tp)
        extents = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": TOKENS, "C": CONTENT}
        self.whole = torch.full([extents[axis] for axis in layout], POISON, dtype=torch.int16)
        self.cache = self.whole.permute([layout.index(axis) for axis in "LBHNC"])
        self.first = rank * HEADS // tp
        shape = tuple(self.cache[0].shape)
        layer_caches = [
            LayerCache(NAMES[n], self.cache[n].data_ptr(), shape, tuple(self.cache[n].stride()), "int16")
            for n in range(LAYERS)
        ]
        place = ParallelRank.from_rank(rank, tp, 1)
        self.component_cache: ComponentCache
        (self.component_cache,) = component_caches(
            [CacheGroup(NAMES, kind, TOKENS)], layer_caches, BLOCKS, ModelTotals(HEADS), place
        )
        self.part = PagePart.held(self.component_cache.component, place.fleet(TOKENS), rank, TOKENS)
        backing = self.whole.flatten().view(torch.uint8)
        settings = StoreSettings(root=root, upkeep_s=0.01, flush_s=0.01)
        blocks = BlockStore.open(settings, SPACE, place.fleet(TOKENS), rank, [(self.component_cache, backing)])
        self.offload = OffloadWorker(blocks, settings)

    def fill(self, of_model: torch.Tensor) -> None:
        """Blocks 0 to 3 of the rank are the model's; a latent is its first head."""
        heads = self.cache.shape[2]
        first = 0 if heads == 1 and self.component_cache.component.heads == 1 else self.first
        self.cache[:, :4] = of_model[:, :, first : first + heads]

    def load(self, order: LoadSpec) -> list[bool]:
        self.offload.load(order)
        deadline = time.monotonic() + 30
        while not (loaded := self.offload.loaded()):
            assert time.monotonic() < deadline, "waited 30 s"
            time.sleep(0.001)
        return loaded[0][1]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def build(layout: str = "LBNHC", tp: int = 1, rank: int = 0, kind: str = "full_attention") -> Rank:
        made.append(Rank(tmp_path, layout, tp, rank, kind))
        return made[-1]

    yield build
    for rank in made:
        rank.offload.close()


def of_model() -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, (LAYERS, 4, HEADS, TOKENS, CONTENT), dtype=torch.int16)


SAVE = SaveSpec("r", HASHES, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("layout", "tp", "kind"),
    [("LBHNC", 2, "full_attention"), ("BLNHC", 8, "full_attention"), ("BHLNC", 4, "mla_attention")],
)
def test_what_all_ranks_have_stored_every_other_fleet_loads(
    make: Callable[..., Rank], tmp_path: Path, layout: str, tp: int, kind: str
) -> None:
    truth, ranks = of_model(), [make(layout, tp, rank, kind) for rank in range(tp)]
    reader = make("LBNHC", kind=kind)
    with closing(StoreLookup.open(tmp_path, SPACE, [reader.part])) as lookout:
        assert lookout.leading(HASHES) == 0
        for rank in ranks:
            rank.fill(truth)
            rank.offload.save(SAVE, Passed())
        for rank in ranks:
            rank.offload.settle()
            assert not rank.offload.is_saving("r")
            assert rank.offload.stored() == list(HASHES)
        assert lookout.leading(HASHES) == 4
        assert lookout.leading((HASHES[0], page_of(b"another"), HASHES[2])) == 1
    assert reader.load(LoadSpec("d", (HASHES[2], HASHES[0]), (5, 1))) == [True, True]
    wanted = torch.full_like(reader.cache, POISON)
    heads = reader.cache.shape[2]
    wanted[:, 5], wanted[:, 1] = truth[:, 2, :heads], truth[:, 0, :heads]
    assert torch.equal(reader.cache, wanted)
    assert reader.offload.take_counts()["loaded_blocks"] == 2


def test_of_ranks_that_hold_the_same_each_block_is_written_by_one(make: Callable[..., Rank]) -> None:
    truth, ranks = of_model(), [make("LBNHC", 2, rank, "mla_attention") for rank in range(2)]
    for rank in ranks:
        rank.fill(truth)
        rank.offload.save(SAVE, Passed())
        rank.offload.settle()
    written = [rank.offload.blocks.store.counters.written_bytes for rank in ranks]
    assert sum(written) == 4 * LAYERS * TOKENS * CONTENT * 2


def test_a_block_that_is_not_there_is_told_and_the_others_loaded(make: Callable[..., Rank]) -> None:
    rank = make()
    rank.fill(of_model())
    rank.offload.save(SaveSpec("r", HASHES[:1], (0,)), Passed())
    rank.offload.settle()
    assert rank.load(LoadSpec("d", HASHES[:2], (4, 5))) == [True, False]
    assert torch.equal(rank.cache[:, 4], rank.cache[:, 0])
    counts = rank.offload.take_counts()
    assert (counts["stored_blocks"], counts["loaded_blocks"], counts["failed_loads"]) == (1, 1, 1)


def test_blocks_that_could_not_be_computed_are_not_stored_and_the_thread_goes_on(
    make: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    rank = make()
    rank.offload.save(SAVE, Never())
    rank.offload.save(SaveSpec("other", HASHES[:1], (0,)), Passed())
    rank.offload.settle()
    assert (rank.offload.stored(), rank.offload.is_saving("r")) == ([HASHES[0]], False)
    assert rank.offload.take_counts()["failed_stores"] == 4
    assert "4 blocks of r were not stored" in caplog.text


def test_a_scheduler_clears_what_its_ranks_have_stored(make: Callable[..., Rank], tmp_path: Path) -> None:
    rank = make()
    rank.offload.save(SAVE, Passed())
    rank.offload.settle()
    with closing(StoreLookup.open(tmp_path, SPACE, [rank.part, rank.part])) as lookout:
        assert (len(lookout.views), lookout.leading(HASHES)) == (1, 4)
        lookout.clear()
        assert lookout.leading(HASHES) == 0
    assert rank.load(LoadSpec("d", HASHES[:1], (4,))) == [False]


def test_a_block_is_told_of_when_each_rank_has_stored_it_and_not_when_one_has_twice() -> None:
    events = StoredBlockEvents(2)
    events.expect(HASHES[0], lambda: "first")
    events.expect(HASHES[0], lambda: "again")
    events.heard({HASHES[0]: frozenset((1,))})
    events.heard({HASHES[0]: frozenset((1,))})
    assert events.take() == []
    events.heard({HASHES[0]: frozenset((0,))})
    events.expect(HASHES[0], lambda: pytest.fail("made for nobody"))
    events.heard({HASHES[0]: frozenset((0, 1))})
    assert events.take() == ["first"]
    events.forget()
    events.expect(HASHES[0], lambda: "stored anew")
    events.heard({HASHES[0]: frozenset((0, 1))})
    assert events.take() == ["stored anew"]


def test_blocks_go_to_the_namespace_that_the_store_has_become_and_to_none_without_one(
    make: Callable[..., Rank], tmp_path: Path
) -> None:
    later = Namespace("model", "version 7", TOKENS)
    writer, reader, truth = make(), make("LBHNC"), of_model()
    writer.fill(truth)
    with (
        closing(StoreLookup.open(tmp_path, SPACE, [writer.part])) as lookup,
        closing(StoreLookup.open(tmp_path, SPACE, [writer.part])) as before,
    ):
        for space, here, there in ((None, 0, 0), (later, 4, 0)):
            writer.offload.become(space)
            lookup.become(space)
            writer.offload.save(SAVE, Passed())
            writer.offload.settle()
            assert (lookup.leading(HASHES), before.leading(HASHES)) == (here, there)
    load = LoadSpec("r", HASHES, (2, 3, 4, 5))
    assert reader.load(load) == [False] * 4
    reader.offload.become(later)
    assert reader.load(load) == [True] * 4
    assert torch.equal(reader.cache[:, 2:], truth)
    assert (reader.cache[:, :2] == POISON).all()


def test_a_store_that_is_gone_when_the_weights_change_costs_its_hits_and_says_so(
    make: Callable[..., Rank], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = make()
    shutil.rmtree(tmp_path)
    rank.offload.become(Namespace("model", "version 7", TOKENS))
    assert "nothing is stored or found from now on" in caplog.text
    rank.offload.save(SAVE, Passed())
    rank.offload.settle()
    assert rank.load(LoadSpec("r", HASHES, (0, 1, 2, 3))) == [False] * 4
