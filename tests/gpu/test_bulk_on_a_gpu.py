"""Bulk moves on a real GPU equal the definition on the CPU, by every engine, and wait for the pages' producer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvmover.kernels import bulk, copy_times, crossover, experimental, reference  # noqa: E402
from kvmover.kernels.bulk import CopyEngine  # noqa: E402
from kvmover.kernels.experimental import Pieces, TensorBoxes, tensor_boxes  # noqa: E402
from kvmover.kernels.pinned import pinned  # noqa: E402
from kvmover.kernels.region import Region, RegionError, Side, merged  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: About 0.1 s of waiting at 1.7 GHz: longer than it takes to queue a move.
SLEEP_CYCLES = 170_000_000


@pytest.fixture(params=CopyEngine, ids=lambda engine: engine.name.lower())
def engine(request: pytest.FixtureRequest) -> CopyEngine:
    return _available(request.param)


@pytest.fixture(params=["own-stream", "default-stream"])
def stream(request: pytest.FixtureRequest):
    """What the move is queued on: a stream of its own, or the legacy default stream that batched copies refuse."""
    chosen = torch.cuda.Stream() if request.param == "own-stream" else torch.cuda.default_stream()
    with torch.cuda.stream(chosen):
        yield chosen
    torch.cuda.synchronize()


def _available(engine: CopyEngine) -> CopyEngine:
    reason = bulk.unavailable(engine, torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(f"{engine.value}: {reason}")
    return engine


@dataclass(frozen=True)
class Pages:
    """Pools of `pages` pages of `tokens` rows of each of `heads` heads, in 3 planes, two thirds of the pages moved.

    Rows lie in the order plane, page, token, head on one side and plane, page, head, token on the other.
    """

    row_bytes: int
    tokens: int = 4
    heads: int = 2
    pages: int = 13
    planes: int = 3

    def __str__(self) -> str:
        return f"{self.row_bytes}B-{self.tokens}x{self.heads}"

    @property
    def page_bytes(self) -> int:
        return self.tokens * self.heads * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.planes * self.pages * self.page_bytes

    def side(self, memory, order: str, seed: int) -> Side:
        ids = np.random.default_rng(seed).permutation(self.pages)[: 2 * self.pages // 3]
        planes = np.arange(self.planes) * self.pages * self.page_bytes
        head, token = (1, self.heads) if order == "NHD" else (self.tokens, 1)
        zero = np.zeros(self.planes, np.int64)
        return Side.of((memory,), zero, planes, ids * self.page_bytes, head * self.row_bytes, token * self.row_bytes)

    def region(self, src, dst, orders: tuple[str, str], seed: int) -> Region:
        sides = self.side(src, orders[0], seed), self.side(dst, orders[1], seed + 1)
        return Region(*sides, self.heads, self.tokens, self.row_bytes)


def _random(nbytes: int, seed: int):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _pinned(content):
    memory = pinned(content.numel())
    memory.copy_(content)
    return memory


def _chain(pages: Pages, orders: tuple[tuple[str, str], ...], engine: CopyEngine, sms: int | None) -> None:
    """Pinned host to device to device to pinned host; after each, all bytes of all pools, untouched ones too."""
    contents = [_random(pages.nbytes, seed) for seed in range(4)]
    expected = [content.clone() for content in contents]
    pools = [_pinned(contents[0]), contents[1].cuda(), contents[2].cuda(), _pinned(contents[3])]
    for number, order in enumerate(orders):
        reference.move([pages.region(*expected[number : number + 2], order, number)])
        bulk.move([pages.region(*pools[number : number + 2], order, number)], sms=sms, engine=engine)
    torch.cuda.synchronize()
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool.cpu(), wanted)


WHOLE = (("NHD", "NHD"),) * 3
RELAYOUT = (("NHD", "HND"), ("HND", "NHD"), ("NHD", "HND"))

#: Runs of the relayout. Of whole pages, all rows of a page are one run: from 128 B, through many stages, to 4 MiB.
CASES = [Pages(row) for row in (16, 48, 256, 272, 2048, 2064, 4096, 4112, 16 << 10)]
CASES += [Pages(row, tokens=2, pages=3, planes=2) for row in (40_000, 100_000, 1 << 20)]
BUDGETS = [(CopyEngine.BULK, 1), (CopyEngine.BULK, 2), (CopyEngine.BULK, 4), (CopyEngine.ROWS, 1), (CopyEngine.ROWS, 4)]
BUDGETS += [(CopyEngine.TENSOR, 1), (CopyEngine.TENSOR, 4)]
BUDGETS += [(engine, 1) for engine in (CopyEngine.COPY, CopyEngine.BOXES, CopyEngine.LOOP, CopyEngine.GREEN)]


@pytest.mark.parametrize("pages", CASES, ids=str)
@pytest.mark.parametrize(("engine", "sms"), BUDGETS, ids=lambda value: str(getattr(value, "name", value)).lower())
def test_whole_pages_go_round_by_every_engine(engine: CopyEngine, sms: int, pages: Pages) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        _chain(pages, WHOLE, _available(engine), sms)


@pytest.mark.parametrize("pages", CASES, ids=str)
def test_rows_change_their_order_by_every_engine(engine: CopyEngine, pages: Pages, stream) -> None:
    _chain(pages, RELAYOUT, engine, 2)


@pytest.mark.parametrize("row_bytes", [1, 24, 656, 2050, 4096, 33_000, 1 << 17])
@pytest.mark.parametrize("orders", [WHOLE, RELAYOUT], ids=["whole", "relayout"])
def test_the_chosen_engine_moves_rows_of_any_width(row_bytes: int, orders, stream) -> None:
    _chain(Pages(row_bytes, tokens=3), orders, CopyEngine.AUTO, None)


@pytest.mark.parametrize(
    "shape",
    [experimental.Ring(2, 1024, 1), experimental.Ring(3, 16 << 10, 1), experimental.Ring(7, 32 << 10, 3)],
    ids=str,
)
@pytest.mark.parametrize("of", Pieces)
def test_any_ring_moves_the_same_bytes(shape: experimental.Ring, of: Pieces) -> None:
    _available(CopyEngine.TENSOR if of is Pieces.BOXES else CopyEngine.BULK)
    for row_bytes in (48, 256, 2064, 40_000):
        pages = Pages(row_bytes, pages=31)
        src, dst = _random(pages.nbytes, 1), _random(pages.nbytes, 2)
        on_gpu = src.cuda(), dst.cuda()
        launch = experimental.describe([pages.region(*on_gpu, RELAYOUT[0], 5)], shape, of)
        experimental.run(launch, torch.from_numpy(launch.table).cuda(), 3)
        reference.move([pages.region(src, dst, RELAYOUT[0], 5)])
        assert torch.equal(on_gpu[1].cpu(), dst)


#: Head slices of pages, as boxes: of all widths that a row of a box may have, of more rows than a box may have, of more
#: than a stage holds, and of more planes than a block has threads.
SLICES = [Pages(row, tokens=64, heads=4) for row in (16, 112, 128, 256, 656, 1024, 2048)]
SLICES += [Pages(16, tokens=1024, pages=5), Pages(256, tokens=40, planes=160, pages=4)]


@pytest.mark.parametrize("sms", [1, 3, 64])
@pytest.mark.parametrize("pages", SLICES, ids=str)
def test_head_slices_move_as_boxes(pages: Pages, sms: int, stream) -> None:
    for orders in RELAYOUT[:2]:
        contents = [_random(pages.nbytes, seed) for seed in (1, 2)]
        on_gpu = [content.cuda() for content in contents]
        region = pages.region(*on_gpu, orders, 5)
        assert isinstance(tensor_boxes(merged(region), experimental.RING.stage_bytes), TensorBoxes)
        bulk.move([region], sms=sms, engine=_available(CopyEngine.TENSOR))
        torch.cuda.synchronize()
        reference.move([pages.region(*contents, orders, 5)])
        assert torch.equal(on_gpu[1].cpu(), contents[1])


def test_rows_at_a_pitch_on_both_sides_move_as_boxes(stream) -> None:
    """A head of four, into the first of two."""
    _available(CopyEngine.TENSOR)
    src, dst = Pages(256, tokens=64, heads=4), Pages(256, tokens=64, heads=2)
    contents = [_random(pages.nbytes, seed) for seed, pages in enumerate((src, dst))]
    on_gpu = [content.cuda() for content in contents]

    def region(memory) -> Region:
        return Region(src.side(memory[0], "NHD", 1), dst.side(memory[1], "NHD", 2), 1, 64, 256)

    bulk.move([region(on_gpu)], sms=2, engine=CopyEngine.TENSOR)
    torch.cuda.synchronize()
    reference.move([region(contents)])
    assert torch.equal(on_gpu[1].cpu(), contents[1])


def test_maps_that_take_the_place_of_others_are_the_ones_that_count() -> None:
    """Tables of one size follow each other at one address, and what an SM knew of its maps is void each time."""
    _available(CopyEngine.TENSOR)
    pages, places = Pages(256, tokens=64, heads=4, planes=7), set[int]()
    with torch.cuda.stream(torch.cuda.Stream()):
        for seed in range(12):
            contents = [_random(pages.nbytes, each) for each in (seed, 99)]
            on_gpu = [content.cuda() for content in contents]
            region = pages.region(*on_gpu, RELAYOUT[0], seed)
            launch = experimental.describe([region], of=Pieces.BOXES)
            table = torch.from_numpy(launch.table).cuda()
            places.add(table.data_ptr())
            experimental.run(launch, table, 4)
            torch.cuda.synchronize()
            reference.move([pages.region(*contents, RELAYOUT[0], seed)])
            assert torch.equal(on_gpu[1].cpu(), contents[1])
            del table
    assert len(places) < 12


def test_regions_of_both_chosen_engines_share_a_move(stream) -> None:
    cases = [Pages(row, tokens) for row, tokens in [(16, 3), (512, 4), (2048, 1), (4096, 64), (24, 4), (1 << 19, 1)]]
    host = [_random(case.nbytes, seed) for seed, case in enumerate(cases)]
    pinned, gpu = [_pinned(each) for each in host], [torch.zeros(each.numel(), dtype=torch.uint8) for each in host]
    on_gpu = [each.cuda() for each in gpu]
    regions = [case.region(a, b, RELAYOUT[0], 7) for case, a, b in zip(cases, pinned, on_gpu, strict=True)]
    assert {bulk.choose(region) for region in regions} == {CopyEngine.COPY, CopyEngine.ROWS}
    bulk.move(regions)
    reference.move([case.region(a, b, RELAYOUT[0], 7) for case, a, b in zip(cases, host, gpu, strict=True)])
    for got, wanted in zip(on_gpu, gpu, strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_both_engines_are_timed_and_what_follows_is_chosen(monkeypatch) -> None:
    monkeypatch.setattr(crossover, "_known", {})
    monkeypatch.setattr(copy_times, "_timed", set())
    device = torch.device("cuda", torch.cuda.current_device())
    times = copy_times.times(copy_times._Bench(device))
    assert {each.host for each in times} == {"src", "dst"}
    assert all(each.rows_us > 0 and each.copy_us > 0 for each in times)
    found = copy_times.calibrate(device)
    assert crossover.known(device) == found
    for copies, nbytes in ((16, 1024), (1024, 4096), (4, 1 << 20)):
        host, on_gpu = pinned(2 * copies * nbytes), torch.zeros(2 * copies * nbytes, dtype=torch.uint8, device="cuda")
        starts = np.arange(copies) * 2 * nbytes
        src, dst = (Side.of((each,), *[np.zeros(1, np.int64)] * 2, starts, 0, 0) for each in (host, on_gpu))
        assert bulk.choose(Region(src, dst, 1, 1, nbytes)) is found.engine("src", copies, nbytes)
        assert bulk.choose(Region(dst, src, 1, 1, nbytes)) is found.engine("dst", copies, nbytes)


@pytest.mark.parametrize("way", ["to-host", "to-device", "on-device"])
def test_nothing_is_read_before_its_producer_is_done(engine: CopyEngine, way: str, stream) -> None:
    """A long kernel on another stream writes the pages; the move is queued meanwhile, and work after it sees them."""
    pages = Pages(4096)
    new = _random(pages.nbytes, 3)
    src = _pinned(torch.zeros_like(new)) if way == "to-device" else torch.zeros_like(new).cuda()
    dst = _pinned(torch.zeros_like(new)) if way == "to-host" else torch.zeros_like(new).cuda()
    region, on_gpu = pages.region(src, dst, RELAYOUT[0], 1), new.cuda()
    expected, seen = torch.zeros_like(new), torch.zeros_like(on_gpu)
    bulk.move([region], engine=engine, sms=2)  # compiles, and makes the own stream
    torch.cuda.synchronize()
    producer = torch.cuda.Stream()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(SLEEP_CYCLES)
        src.copy_(on_gpu, non_blocking=True)
        done = producer.record_event()
    bulk.move([region], after=done, engine=engine, sms=2)
    seen.copy_(dst, non_blocking=True)
    assert not done.query(), "the move waited for the device"
    torch.cuda.synchronize()
    reference.move([pages.region(new, expected, RELAYOUT[0], 1)])
    assert torch.equal(dst.cpu(), expected)
    assert torch.equal(seen.cpu(), expected), "work queued after the move ran before it"


def test_what_the_stream_did_before_is_read_without_an_event(engine: CopyEngine, stream) -> None:
    pages = Pages(4096)
    new = _random(pages.nbytes, 4)
    src, dst, on_gpu = torch.zeros_like(new).cuda(), _pinned(torch.zeros_like(new)), new.cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    src.copy_(on_gpu)
    bulk.move([pages.region(src, dst, WHOLE[0], 1)], engine=engine)
    torch.cuda.synchronize()
    expected = torch.zeros_like(new)
    reference.move([pages.region(new, expected, WHOLE[0], 1)])
    assert torch.equal(dst, expected)


def test_a_thread_that_never_used_the_gpu_can_move(engine: CopyEngine) -> None:
    """Such a thread has no context until torch gives it one, and the driver's own calls ask for one."""
    pages = Pages(4096)
    content, expected = _random(pages.nbytes, 8), _random(pages.nbytes, 9)
    src, dst = content.cuda(), _pinned(expected)
    own = torch.cuda.Stream()

    prepared = bulk.prepare([pages.region(src, dst, RELAYOUT[0], 1)], engine=engine)

    def move() -> None:
        with torch.cuda.stream(own):
            prepared.run()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(move).result()
    torch.cuda.synchronize()
    reference.move([pages.region(content, expected, RELAYOUT[0], 1)])
    assert torch.equal(dst, expected)


def test_a_prepared_move_runs_again(engine: CopyEngine) -> None:
    pages = Pages(2048)
    contents = [_random(pages.nbytes, seed) for seed in (5, 6)]
    src, dst = torch.zeros_like(contents[0]).cuda(), _pinned(torch.zeros_like(contents[0]))
    prepared = bulk.prepare([pages.region(src, dst, WHOLE[0], 1)], engine=engine)
    for content in contents:
        src.copy_(content)
        prepared.run()
        torch.cuda.synchronize()
        expected = torch.zeros_like(content)
        reference.move([pages.region(content, expected, WHOLE[0], 1)])
        assert torch.equal(dst, expected)


def test_more_copies_than_one_call_takes() -> None:
    _available(CopyEngine.COPY)
    pages = Pages(16, tokens=1, heads=1, pages=30_000, planes=1)
    src, dst = _random(pages.nbytes, 1), _random(pages.nbytes, 2)
    pinned, on_gpu = _pinned(src), dst.cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        bulk.move([pages.region(pinned, on_gpu, WHOLE[0], 1)], engine=CopyEngine.COPY)
    torch.cuda.synchronize()
    reference.move([pages.region(src, dst, WHOLE[0], 1)])
    assert torch.equal(on_gpu.cpu(), dst)


def test_addresses_beyond_two_to_the_32_bytes_are_reached(engine: CopyEngine) -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    pool = torch.zeros(9 << 30, dtype=torch.uint8, device="cuda")
    starts = np.array([0, (2 << 30) - 4096, (5 << 30) + 4096, (9 << 30) - 4096], np.int64)
    for number, start in enumerate(starts.tolist()):
        pool[start : start + 4096] = number + 1
    host, zero = pinned(4 * 4096), np.zeros(1, np.int64)
    src, dst = Side.of((pool,), zero, zero, starts, 0, 0), Side.of((host,), zero, zero, np.arange(4) * 4096, 0, 0)
    bulk.move([Region(src, dst, 1, 1, 4096)], engine=engine)
    torch.cuda.synchronize()
    assert host.view(4, 4096).float().mean(dim=1).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_many_moves_in_a_row_keep_their_tables(engine: CopyEngine) -> None:
    """Twenty at once: the pinned ring of tables holds eight."""
    pool = _random(1 << 20, 1)
    on_gpu, zero = pool.cuda(), np.zeros(1, np.int64)
    outs = [pinned(1 << 16) for _ in range(20)]
    starts = [np.random.default_rng(number).permutation(256)[:16].astype(np.int64) * 4096 for number in range(20)]
    for units, out in zip(starts, outs, strict=True):
        dst = Side.of((out,), zero, zero, np.arange(16) * 4096, 0, 0)
        bulk.move([Region(Side.of((on_gpu,), zero, zero, units, 0, 0), dst, 1, 1, 4096)], engine=engine)
    torch.cuda.synchronize()
    for units, out in zip(starts, outs, strict=True):
        assert torch.equal(out.view(16, 4096), pool.view(256, 4096)[torch.from_numpy(units // 4096)])


def test_memory_the_gpu_cannot_reach_is_refused() -> None:
    pages = Pages(4096)
    on_gpu, plain = torch.zeros(pages.nbytes, dtype=torch.uint8, device="cuda"), _random(pages.nbytes, 1)
    good = pages.region(_pinned(plain), on_gpu, WHOLE[0], 1)
    with pytest.raises(RegionError, match="source memory on the host is not pinned"):
        bulk.move([good, pages.region(plain, on_gpu, WHOLE[0], 1)])
    far = replace(good, dst=replace(good.dst, units=good.dst.units + pages.nbytes))
    with pytest.raises(RegionError, match="destination plane 0 spans"):
        bulk.move([good, far])
    with pytest.raises(RegionError, match="cannot share a move"):
        bulk.move([good, pages.region(plain, plain.clone(), WHOLE[0], 1)])
    torch.cuda.synchronize()
    assert not on_gpu.any()


@pytest.mark.parametrize("ring", [CopyEngine.BULK, CopyEngine.TENSOR])
def test_bulk_copies_refuse_rows_off_a_16_byte_border(ring: CopyEngine) -> None:
    _available(ring)
    pages = Pages(4104, tokens=1, heads=1)
    memory = torch.zeros(pages.nbytes, dtype=torch.uint8, device="cuda")
    with pytest.raises(bulk.EngineUnavailable, match="multiples of 16"):
        bulk.move([pages.region(memory, memory.clone(), WHOLE[0], 1)], engine=ring)


def test_pinned_memory_is_what_was_asked_for() -> None:
    for nbytes in (1, 4097, (1 << 20) + 1):
        memory = pinned(nbytes)
        assert memory.is_pinned()
        assert memory.numel() == nbytes
        assert memory.data_ptr() % 4096 == 0
        memory.fill_(7)
        assert int(memory.sum()) == 7 * nbytes
        view = memory[1:]
        del memory  # the last tensor, not the first, frees it
        view[:] = 1
