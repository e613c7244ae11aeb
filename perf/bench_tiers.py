"""Pages between device, host and storage as a rank moves them, beside one contiguous copy and a raw loop over one file.

`python -m perf.bench_tiers [FOLDER on a disk] [--mib N] [--rounds N] [--out FOLDER]`. By the size of a page and by the
order of the axes on the host; the device's is that of engines, a plane a layer. Scattered page ids on both sides, and
every byte is compared before it is timed. Without a GPU the device is memory of the host too, and so is the copy that
all is measured against. `of_copy`: the share of one `copy_` of the same bytes in the same direction; `of_loop`: of a
loop of pwrite or pread over one open file, a page a call, which checks nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from kvmover.cache.prefix import FULL, PrefixTree, Tier, WriteThrough
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.tiers import Controller, ControllerConfig, HostTier, Storage, TieredPool, TierPolicy, Wait
from kvmover.cache.tiers.layerwise_copier import Batch, LayerwiseCopier
from kvmover.cache.tiers.tier_storage import PageRef, StorageRead, StorageWrite
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.store import Namespace, PageStore, files_for
from kvmover.store import Policy as StorePolicy
from kvmover.vocabulary import PACKED_ORDER
from perf.record import RESULTS, Spread, write

#: A page of 16 tokens of 4 heads of 64 bfloat16 is 16 KiB a layer.
TOKENS, HEADS, DIM = 16, 4, 64
LAYERS = (1, 4, 16, 64)
DEVICE_ORDER = "layer kv page token head dim"
HOST_ORDERS = (PACKED_ORDER, "page layer kv token head dim", DEVICE_ORDER)
GROUP_LAYERS = 8
FLEET = Fleet(page_tokens=TOKENS)
SPACE = Namespace("bench", "1", TOKENS)
TO_HOST, TO_DEVICE, TO_DISK, FROM_DISK = "device to host", "host to device", "host to storage", "storage to host"
COPY, LOOP = "one copy_", "a loop over one file"


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed, and what goes before, which is not."""

    way: str
    what: str
    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


class Bench:
    """A rank with `pages` pages on each tier, over a store in `folder`."""

    def __init__(self, folder: Path, layers: int, order: str, pages: int) -> None:
        component = Component.attention(layers, HEADS, DIM, "bfloat16")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        spec = PoolSpec.dense(component, FLEET.shard(component, 0, TOKENS), pages, TOKENS, DEVICE_ORDER)
        pool = Pool(spec, (torch.randint(0, 255, (spec.allocation_bytes,), dtype=torch.uint8, device=device),))
        self.pages, self.page_bytes = pages, spec.allocation_bytes // pages
        self.tiered_pool = TieredPool.of(component, FLEET, 0, pool, HostTier(pages, order))
        self.copies = LayerwiseCopier(device, GROUP_LAYERS)
        self.store = PageStore.open(folder, SPACE, StorePolicy(segment_bytes=1 << 30), files_for(folder))
        self.storage = Storage(self.store, SPACE, [self.tiered_pool], FLEET, 0)
        self.tokens = np.arange(pages * TOKENS, dtype=np.int32)
        self.hashes = chain(b"", self.tokens, TOKENS)
        self.ids = [np.random.default_rng(seed).permutation(pages) for seed in (0, 1)]
        direct = 0 if "buffered" in self.store.objects.name else os.O_DIRECT
        self.file = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | direct)
        self.flat = self.tiered_pool.host.tensors[0].numpy()

    def cases(self) -> Iterator[Case]:
        host, device = self.tiered_pool.host.tensors[0], self.tiered_pool.device.tensors[0]
        yield Case(TO_HOST, COPY, lambda: self._whole(host, device))
        yield Case(
            TO_HOST, "torch, a plane at a time", lambda: self._planes(self.tiered_pool.device, self.tiered_pool.host)
        )
        yield Case(TO_HOST, "kvmover", lambda: self.copy(Tier.HOST))
        yield Case(TO_DEVICE, COPY, lambda: self._whole(device, host))
        yield Case(
            TO_DEVICE, "torch, a plane at a time", lambda: self._planes(self.tiered_pool.host, self.tiered_pool.device)
        )
        yield Case(TO_DEVICE, "kvmover", lambda: self.copy(Tier.DEVICE))
        yield Case(TO_DEVICE, f"kvmover, the first {GROUP_LAYERS} layers", self.first_layers, self.settled)
        yield Case(TO_DISK, COPY, lambda: self._whole(host, device))
        yield Case(TO_DISK, LOOP, lambda: self._loop(os.pwrite), lambda: os.ftruncate(self.file, 0))
        yield Case(TO_DISK, f"kvmover, {self.store.objects.name}", self.write, self.store.clear)
        yield Case(FROM_DISK, COPY, lambda: self._whole(device, host))
        yield Case(FROM_DISK, LOOP, lambda: self._loop(None))
        yield Case(FROM_DISK, f"kvmover, {self.store.objects.name}", self.read)

    def copy(self, dst: Tier) -> None:
        over: list[bool] = []
        self.gate = self.copies.begin([self._batch()], dst, lambda: over.append(True))
        while not over:
            self.copies.poll()

    def first_layers(self) -> None:
        """What a forward pass waits for before it starts."""
        gate = self.copies.begin([self._batch()], Tier.DEVICE, lambda: None)
        gate.wait(0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def settled(self) -> None:
        while self.copies.busy:
            self.copies.poll()

    def write(self) -> None:
        job = StorageWrite(self.storage, self._wanted())
        while not job.step():
            pass
        assert job.stored == self.pages, job.failed

    def read(self) -> None:
        job = StorageRead(self.storage, self._wanted(), self.pages, lambda: False)
        while not job.step():
            pass
        assert job.good == self.pages, job.why

    def check(self) -> None:
        """Device to host to storage to host to device: every byte is where it was."""
        before = self.tiered_pool.device.tensors[0].clone()
        self.copy(Tier.HOST)
        self.write()
        self.tiered_pool.host.tensors[0].zero_()
        self.read()
        self.tiered_pool.device.tensors[0].zero_()
        self.copy(Tier.DEVICE)
        assert torch.equal(before, self.tiered_pool.device.tensors[0])

    def close(self) -> None:
        self.settled()
        os.close(self.file)
        self.store.close()

    def _batch(self) -> Batch:
        return Batch(self.tiered_pool, self.ids[0].tolist(), self.ids[1].tolist())

    def _wanted(self) -> list[tuple]:
        (stored_pool,) = self.storage.stored_pools
        return [(stored_pool, PageRef(n, self.hashes[n], int(self.ids[0][n]))) for n in range(self.pages)]

    def _whole(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _planes(self, src: Pool, dst: Pool) -> None:
        host, device = (torch.from_numpy(ids) for ids in self.ids)
        of_src, of_dst = (device, host) if src is self.tiered_pool.device else (host, device)
        for layer in range(src.spec.layout.extent_of("layer")):
            for kv in range(2):
                there = dst.plane(layer, kv)
                there[of_dst.to(there.device)] = src.plane(layer, kv)[of_src.to(src.tensors[0].device)].to(there.device)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _loop(self, call: Callable[[int, memoryview, int], int] | None) -> None:
        size = self.page_bytes
        whole = memoryview(cast(Any, self.flat))
        for place, page in enumerate(self.ids[0].tolist()):
            part = whole[page * size : (page + 1) * size]
            if call:
                call(self.file, part, place * size)
            else:
                os.preadv(self.file, [part], place * size)


class Requests:
    """A controller, whose one prompt is restored from the host or from storage: everything that a request waits for."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        tree = PrefixTree(TOKENS, tiers=WriteThrough())
        config = ControllerConfig(TierPolicy(prefetch=Wait(), reading_share=1.0), group_layers=GROUP_LAYERS)
        self.controller = Controller(tree, [bench.tiered_pool], bench.storage, config)
        taken = self.controller.take(bench.pages)
        assert taken is not None
        self.controller.keep(bench.tokens, taken)
        self.controller.wait()

    def cases(self) -> Iterator[Case]:
        yield Case(TO_DEVICE, "a request, from the host", self.restore, self.off_device)
        yield Case(FROM_DISK, "a request, from storage", self.restore, self.off_host)

    def restore(self) -> None:
        restore = self.controller.restore(self.bench.tokens, limit_tokens=len(self.bench.tokens))
        self.controller.wait(restore)
        assert restore.tokens == len(self.bench.tokens), restore.lost
        self.controller.release(restore)

    def off_device(self) -> None:
        self.controller.wait()
        self.controller.allocator.apply(self.controller.tree.evict(self.bench.pages, FULL))

    def off_host(self) -> None:
        self.off_device()
        self.controller.allocator.apply(self.controller.tree.evict_host(self.bench.pages, FULL))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--mib", type=int, default=64)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--out", type=Path, default=RESULTS)
    chosen = options.parse_args()
    rows: list[dict[str, object]] = []
    for medium, root in (("tmpfs", Path("/dev/shm")), ("disk", chosen.folder)):
        for layers in LAYERS:
            for order in HOST_ORDERS:
                with opened(root, layers, order, chosen.mib << 20) as bench:
                    rows += measured(bench, medium, order, chosen.rounds)
    print(f"wrote {write('bench_tiers', rows, chosen.out)}")


@contextmanager
def opened(root: Path, layers: int, order: str, nbytes: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(dir=root) as place:
        bench = Bench(Path(place), layers, order, nbytes // (layers * TOKENS * HEADS * DIM * 4))
        bench.check()
        yield bench
        bench.close()


def measured(bench: Bench, medium: str, order: str, rounds: int) -> list[dict[str, object]]:
    """Every case once a round, after one round unmeasured. On the disk only what goes to it."""
    requests = Requests(bench)
    cases = [case for case in (*bench.cases(), *requests.cases()) if medium == "tmpfs" or "storage" in case.way]
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for case in cases:
            if case.what.startswith("a request") and not bench.store.stat().pages:
                bench.write()
            case.before()
            began = time.perf_counter()
            case.run()
            if number:
                samples.setdefault((case.way, case.what), []).append(time.perf_counter() - began)
    requests.controller.close()
    spreads = {key: Spread.of(times) for key, times in samples.items()}
    nbytes, load = bench.pages * bench.page_bytes, round(os.getloadavg()[0], 1)
    rows: list[dict[str, object]] = []
    for (way, what), spread in spreads.items():
        loop = spreads.get((way, LOOP))
        row: dict[str, object] = {
            "medium": medium if "storage" in way else "memory",
            "page_kib": bench.page_bytes >> 10,
            "host_order": order,
            "way": way,
            "what": what,
            "gb_s": round(nbytes / spread.median / 1e9, 3),
            "gb_s_p10": round(nbytes / spread.high / 1e9, 3),
            "gb_s_p90": round(nbytes / spread.low / 1e9, 3),
            "of_copy": round(spreads[way, COPY].median / spread.median, 3),
            "of_loop": round(loop.median / spread.median, 3) if loop else "",
            "load": load,
        }
        print(
            f"{row['medium']:<7}{row['page_kib']:>5} KiB  {order:<29} {way:<16} {what:<28}{row['gb_s']:>8} GB/s"
            f" {row['of_copy']:>7} of copy_ {row['of_loop']:>7}",
            flush=True,
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
