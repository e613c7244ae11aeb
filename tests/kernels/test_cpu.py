"""The C core moves the bytes that the definition moves, has its digests, and touches nothing else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from digest_cases import coordinates, merged
from row_moves import FAR, HND, MOVES, NAMES, NHD, TOGETHER, FarMove, Move, PoolShape, ids, run

from kvmover.c_core import NATIVE
from kvmover.kernels import cpu, digest_reference
from kvmover.kernels.region import Planes, Region, RegionError, Side
from tests.proofs import family, tries
from tests.sanitised import told

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C core was not built")
VECTORS: tuple[str, ...] = NATIVE.vectors() if NATIVE else ()


@pytest.fixture
def threads() -> Iterator[None]:
    """Three, more than the processors of some machines, and whatever there were afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def random_move(random: np.random.Generator) -> Move:
    """Any two pools: orders, allocations, page sizes, rows of 1 B to 5 KB that start anywhere, pages in any order."""
    tokens = int(random.choice([1, 2, 3, 8]))
    separate = [(), ("layer",), ("layer", "kv"), ("kv",)]
    shapes = [
        PoolShape(
            str(random.choice(list(NAMES))),
            tokens * int(random.integers(1, 4)),
            4,
            separate[random.integers(4)],
            int(random.integers(0, 17)),
        )
        for _ in range(2)
    ]
    heads = int(random.integers(1, 5))
    firsts = [int(random.integers(0, 5 - heads)) for _ in range(2)]
    taken = tuple(str(each) for each in random.choice(["scattered", "even", "backwards"], 2))
    row_bytes = int(random.choice([random.integers(1, 70), random.integers(1, 300), random.integers(300, 5000)]))
    sizes = {
        "layers": int(random.integers(1, 4)),
        "kv": int(random.integers(1, 3)),
        "units": int(random.integers(1, 9)),
    }
    seed = int(random.integers(1 << 30))
    return Move(*shapes, row_bytes, tokens, heads, *firsts, **sizes, seed=seed, taken=(taken[0], taken[1]))


@pytest.mark.parametrize("move", MOVES, ids=ids(MOVES))
def test_a_move_lands_where_a_loop_over_coordinates_puts_it(move: Move) -> None:
    run([move], cpu.move)


@pytest.mark.parametrize("moves", TOGETHER.values(), ids=TOGETHER.keys())
def test_several_regions_move_together(moves: list[Move]) -> None:
    run(moves, cpu.move)


@pytest.mark.parametrize("seed", family(range(40), few=range(4)))
def test_moves_of_any_shape_land_and_have_their_digest(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(5):
        move = random_move(random)
        run([move], cpu.move)
        region = move.open().region
        logical = coordinates(move, region)
        for side in ("src", "dst"):
            assert cpu.digest([region], [logical], side) == digest_reference.digest([region], [logical], side), move


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("row_bytes", "misaligned"),
    family(product([512, 8192 + 4, 3_000_001], [0, 5]), few=[(8192 + 4, 5), (3_000_001, 0)]),
    ids=str,
)
def test_a_move_larger_than_a_cache_lands_by_several_threads(row_bytes: int, misaligned: int) -> None:
    tokens = max(1, 1 << 14 >> row_bytes.bit_length() - 1)
    src, dst = PoolShape(NHD, tokens, 3, misaligned=misaligned), PoolShape(HND, tokens, 2)
    units = 1 + (9 << 20) // (2 * tokens * row_bytes)
    run([Move(src, dst, row_bytes, tokens, 2, 1, layers=1, kv=1, units=units)], cpu.move)


@pytest.mark.usefixtures("threads")
def test_a_single_row_is_shared_between_threads() -> None:
    src = torch.randint(0, 256, ((10 << 20) + 7,), dtype=torch.uint8)
    whole = torch.full((len(src) + 200,), 77, dtype=torch.uint8)
    zero = np.zeros(1, np.int64)
    ends = (Side.of((memory,), zero, zero, zero, 0, 0) for memory in (src, whole[99:-101]))
    cpu.move([Region(*ends, 1, 1, len(src))])
    assert torch.equal(whole[99:-101], src)
    assert set(whole[:99].tolist() + whole[-101:].tolist()) == {77}


@pytest.mark.parametrize("far", FAR, ids=str)
def test_offsets_past_32_bits_reach_the_right_bytes(far: FarMove, sparse: torch.Tensor) -> None:
    far.run(sparse, cpu.move)


@pytest.mark.parametrize("move", MOVES[::3], ids=ids(MOVES)[::3])
def test_a_digest_is_that_of_the_definition(move: Move) -> None:
    region = move.open().region
    logical = coordinates(move, region)
    for side in ("src", "dst"):
        assert cpu.digest([region], [logical], side) == digest_reference.digest([region], [logical], side)


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 6, 60, 64, 65, 132, 256, 1154])
def test_every_kind_of_vectors_has_the_digest(row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NATIVE is not None
    move = Move(PoolShape(NHD, 4, 5, misaligned=3), PoolShape(NHD, 4, 5), row_bytes, 4, 5, layers=1, units=3, seed=3)
    region = move.open().region
    pairs = [(region, coordinates(move, region))]
    pairs.append(merged(*pairs[0]))
    found = {
        NATIVE.digest_rows(cpu._keyed(each, each.src, logical), row_bytes, threads, vectors)
        for each, logical in pairs
        for vectors in VECTORS
        for threads in (1, 3)
    }
    assert found == {digest_reference.digest([region], [pairs[0][1]], "src")}
    assert next(iter(VECTORS)) == "plain"
    with pytest.raises(ValueError, match="no vectors 'widest'"):
        NATIVE.digest_rows(cpu._keyed(region, region.src, pairs[0][1]), row_bytes, 1, "widest")


@pytest.mark.usefixtures("threads")
def test_a_large_digest_is_summed_by_several_threads() -> None:
    move = Move(PoolShape(NHD, 16, 4), PoolShape(HND, 16, 4), 512, 16, 3, 1, layers=3, units=24)
    region = move.open().region
    region, logical = region, replace(coordinates(move, region), first_head=-2, head_step=-1)
    assert cpu.digest([region, region], [logical, logical], "src") == (
        digest_reference.digest([region, region], [logical, logical], "src")
    )


def test_nothing_has_the_digest_zero() -> None:
    move = Move(PoolShape(NHD, 4, 2), PoolShape(HND, 4, 2), 32, 4, units=0)
    region = move.open().region
    cpu.move([region])
    cpu.move([])
    assert cpu.digest([region], [coordinates(move, region)], "src") == 0


def test_bad_input_is_refused_before_anything_moves() -> None:
    good, bad = (Move(PoolShape(NHD, 4, 2), PoolShape(HND, 4, 2), 32, 4).open() for _ in range(2))
    before = [whole.clone() for whole in good.dst.whole]
    outside = replace(bad.region, dst=replace(bad.region.dst, units=bad.region.dst.units + (1 << 20)))
    onto_itself = replace(bad.region, dst=bad.region.src)
    src = bad.region.src
    memory = tuple(each.to("meta") for each in src.memory)
    elsewhere = replace(src, planes=Planes(memory, src.allocation, src.offset))
    for wrong, words in [
        (outside, "destination plane 0"),
        (onto_itself, "share the byte"),
        (replace(bad.region, src=elsewhere, dst=replace(elsewhere, units=elsewhere.units)), "meta|share"),
    ]:
        with pytest.raises(RegionError, match=words):
            cpu.move([good.region, wrong])
    assert all(torch.equal(a, b) for a, b in zip(before, good.dst.whole, strict=True))
    with pytest.raises(RegionError, match="0 sets of coordinates"):
        cpu.digest([good.region], [], "src")
    with pytest.raises(RegionError, match="memory on meta is not the host's"):
        cpu.digest([replace(bad.region, src=elsewhere, dst=elsewhere)], [coordinates(bad.move, bad.region)], "src")


@pytest.mark.parametrize(
    ("loops", "row_bytes", "threads", "words"),
    [
        ((), 4, 1, "a nest of 0 loops"),
        (((1, 0, 0),) * 6, 4, 1, "a nest of 6 loops"),
        (((2, 0),), 4, 1, "2|loop"),
        (((0, 0, 0),), 4, 1, "a loop of 0 places"),
        (((2, np.zeros(3, np.int64), 0),), 4, 1, "a table of 24 bytes for 2 places"),
        (((1, 0, 0),), 0, 1, "bytes of a row"),
        (((1, 0, 0),), 4, 0, "a number of threads"),
    ],
)
def test_c_refuses_what_is_no_nest_of_loops(loops: tuple, row_bytes: int, threads: int, words: str) -> None:
    assert NATIVE is not None
    for call in (NATIVE.copy_rows, NATIVE.digest_rows):
        with pytest.raises((ValueError, TypeError), match=words):
            call(loops, row_bytes, threads)


def test_without_the_c_core_the_definitions_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "NATIVE", None)
    run([MOVES[0]], cpu.move)
    region = MOVES[0].open().region
    logical = coordinates(MOVES[0], region)
    assert cpu.digest([region], [logical], "src") == digest_reference.digest([region], [logical], "src")


def test_other_threads_run_during_a_move_and_a_digest() -> None:
    """Nobody is made to give up Python's lock here, so the other thread runs only where C gives it up."""
    assert NATIVE is not None
    src, dst = (torch.zeros(8 << 20, dtype=torch.uint8) for _ in range(2))
    ends = [np.array([each.data_ptr()], np.int64) for each in (src, dst)]
    calls = [
        partial(NATIVE.copy_rows, ((1, *ends),), len(src), 1),
        partial(NATIVE.digest_rows, ((1, ends[0], 0),), len(src), 1),
    ]
    go, ran = threading.Semaphore(0), [False, False]

    def other() -> None:
        for number in range(len(calls)):
            go.acquire()
            ran[number] = True

    before = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        for number, call in enumerate(calls):
            go.release()
            for _ in range(1000):
                call()
                if ran[number]:
                    break
    finally:
        sys.setswitchinterval(before)
        for _ in calls:
            go.release()
        thread.join()
    assert ran == [True, True]


STORY = """
import random
import numpy as np
from xxhash import xxh3_64_intdigest
rng, threads = random.Random(5), 3
for round in range(ROUNDS):
    counts = [rng.randint(1, 5) for _ in range(4)]
    row_bytes = rng.choice([rng.randint(1, 40), rng.randint(1, 3000), 70_000]) if round % 8 else 300_000
    ends = []
    for _ in range(2):
        order = rng.sample(range(4), 4)
        stride, size = [0] * 4, row_bytes
        for axis in order:
            stride[axis], size = size, size * counts[axis]
        memory = np.frombuffer(bytearray(rng.randbytes(size)), np.uint8)  # not a byte more
        ends.append((memory, stride))
    loops = [(count, ends[0][1][axis], ends[1][1][axis]) for axis, count in enumerate(counts)]
    tables = [np.arange(counts[0]) * step + memory.ctypes.data for memory, (step, *_) in ends]
    loops[0] = (counts[0], *tables)
    made.copy_rows(tuple(loops), row_bytes, threads)
    starts = [np.array([sum(i * s for i, s in zip(at, stride)) for at in np.ndindex(*counts)]) for _, stride in ends]
    for source, target in zip(*starts):
        assert bytes(ends[0][0][source:][:row_bytes]) == bytes(ends[1][0][target:][:row_bytes])
    keyed = ((counts[0], tables[0], 7), *((count, step, 2**63 + 11) for count, step, _ in loops[1:]))
    assert len({made.digest_rows(keyed, row_bytes, threads, each) for each in made.vectors()}) == 1
for length in [*range(0, 2200, 3), 100_001]:
    cell = bytearray(rng.randbytes(length))
    found = {made.cell_digests([cell], 1, each) for each in made.vectors()}
    assert found == {xxh3_64_intdigest(cell).to_bytes(8, "little")}
print("moved and digested")
"""


@pytest.mark.searched
def test_a_sanitised_build_finds_no_fault(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of memory, of arithmetic, by rows that end where their memory does."""
    story = STORY.replace("ROUNDS", str(tries(20, 400, 1200)))
    assert told(story, Path(__file__).parent, tmp_path_factory) == "moved and digested\n"
