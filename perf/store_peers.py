"""Stores to compare with: plain loops over files, a file for each page, and SGLang's NIXL and file backends.

`KVMOVER_PEERS` names the site-packages folder of an environment that has SGLang (perf/README.md); without it those two
are left out. Nothing of theirs is kept here. All have the same four verbs, over pages numbered from 0 of one buffer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvmover.layout import Component
from kvmover.store import Files, Namespace, PagePart, PageStore, Policy, segment_objects
from kvmover.store import fetch as fetch_module
from kvmover.transport import Memory

#: Tokens of a page, and bytes of one head of one layer of it, which is what digests are taken of: at most 32 KiB, as K
#: and V of a head of Llama are in 64 tokens.
TOKENS, LAYER_BYTES = 64, 32768
#: Pages in a batch, as SGLang's controller makes them (`STORAGE_BATCH_SIZE`).
BATCH = 128


class Contender(Protocol):
    def set(self, numbers: Sequence[int]) -> None: ...
    def get(self, numbers: Sequence[int]) -> None: ...
    def exists(self, numbers: Sequence[int]) -> int: ...
    def close(self) -> None: ...


class Pages:
    """Source and destination of every page, in one registered buffer: the second half is read into."""

    def __init__(self, buffer: Any, memory: Memory, page_bytes: int, count: int) -> None:
        self.buffer, self.memory, self.page_bytes, self.count = buffer, memory, page_bytes, count
        view = memoryview(buffer)
        self.sources = [view[n * page_bytes : (n + 1) * page_bytes] for n in range(count)]
        half = count * page_bytes
        self.targets = [view[half + n * page_bytes : half + (n + 1) * page_bytes] for n in range(count)]

    def source(self, number: int) -> int:
        return self.memory.address + number * self.page_bytes

    def target(self, number: int) -> int:
        return self.source(self.count + number)


class OneFile:
    """A loop of pwritev and preadv over one open file: what the device or the page cache gives to one thread."""

    def __init__(self, folder: Path, pages: Pages, flags: int) -> None:
        self.pages = pages
        self.fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | flags)

    def set(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            os.pwritev(self.fd, [self.pages.sources[n]], n * self.pages.page_bytes)

    def get(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            os.preadv(self.fd, [self.pages.targets[n]], n * self.pages.page_bytes)

    def exists(self, numbers: Sequence[int]) -> int:
        return len(numbers)

    def close(self) -> None:
        os.close(self.fd)


class FileEach:
    """A file for each page, opened, moved and closed in place; `head` bytes of header, and published by renaming."""

    def __init__(self, folder: Path, pages: Pages, flags: int, head: int) -> None:
        self.folder, self.pages, self.flags = folder, pages, flags
        self.head = [bytes(head)] if head else []
        self.offset = head

    def set(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            name = f"{self.folder}/{n}"
            fresh = name + ".tmp" if self.head else name
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | self.flags, 0o644)
            os.pwritev(fd, [*self.head, self.pages.sources[n]], 0)
            os.close(fd)
            if self.head:
                Path(fresh).rename(name)

    def get(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            fd = os.open(f"{self.folder}/{n}", os.O_RDONLY | self.flags)
            os.preadv(fd, [self.pages.targets[n]], self.offset)
            os.close(fd)

    def exists(self, numbers: Sequence[int]) -> int:
        return sum((self.folder / str(n)).exists() for n in numbers)

    def close(self) -> None: ...


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


class Ours:
    """The page store through one of its backends."""

    def __init__(self, folder: Path, pages: Pages, files: Files) -> None:
        layer_bytes = min(LAYER_BYTES, pages.page_bytes)
        component = Component.mla(pages.page_bytes // layer_bytes, layer_bytes // TOKENS // 2, "bfloat16")
        space = Namespace("bench", "1", TOKENS)
        self.pages = pages
        self.store = PageStore.open(folder, space, Policy(segment_bytes=1 << 30), files)
        self.store.register(pages.memory)
        self.view = self.store.view(space, PagePart.whole(component, TOKENS))
        self.keys = [key(n) for n in range(pages.count + BATCH)]

    def set(self, numbers: Sequence[int]) -> None:
        answers = self.view.put([self.keys[n] for n in numbers], [self.pages.source(n) for n in numbers])
        assert all(answer.outcome == "written" for answer in answers), answers[0]

    def get(self, numbers: Sequence[int]) -> None:
        answers = self.view.get([self.keys[n] for n in numbers], [self.pages.target(n) for n in numbers])
        assert all(answer.ok for answer in answers), answers[0]

    def exists(self, numbers: Sequence[int]) -> int:
        return self.view.leading([self.keys[n] for n in numbers])

    def close(self) -> None:
        self.store.clear()
        self.store.close()


@contextmanager
def without_digests() -> Iterator[None]:
    """What the store would do if nothing were checked: for their cost, and for nothing else."""
    real = segment_objects.tables

    def blank(payloads: Sequence[memoryview], cells: int) -> list[bytes]:
        return [bytes(8 * cells)] * len(payloads)

    segment_objects.tables = fetch_module.tables = blank
    yield
    segment_objects.tables = fetch_module.tables = real


class OursUnchecked(Ours):
    def set(self, numbers: Sequence[int]) -> None:
        with without_digests():
            super().set(numbers)

    def get(self, numbers: Sequence[int]) -> None:
        with without_digests():
            super().get(numbers)


class _HostPool:
    """The part of SGLang's MLA host pool that its storage asks: one run of bytes for each page of one token."""

    layout, page_size, pin_memory, dtype = "page_first", 1, False, None

    def __init__(self, pages: Pages) -> None:
        torch = import_module("torch")
        self.pages = pages
        self.kv_buffer = torch.from_numpy(np.frombuffer(pages.buffer, np.uint8))

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        numbers = indices.tolist()
        return [self.pages.source(n) for n in numbers], [self.pages.page_bytes] * len(numbers)

    def is_stride_page_aligned(self, alignment: int) -> bool:
        return not (self.pages.memory.address | self.pages.page_bytes) % alignment


class SglangNixl:
    """`HiCacheNixl` with the POSIX plugin, zero copy, one file a page."""

    def __init__(self, folder: Path, pages: Pages, direct: int) -> None:
        module = import_module("sglang.srt.mem_cache.storage.nixl.hicache_nixl")
        self.torch = import_module("torch")
        self.pages, self.folder = pages, folder
        options = {"plugin": {"posix": {"active": True}}, "use_direct_io": bool(direct), "l3_cleaner_enabled": False}
        self.store = module.HiCacheNixl(_config(options), str(folder))
        self.store.register_mem_pool_host(_HostPool(pages))
        assert self.store.is_zero_copy

    def set(self, numbers: Sequence[int]) -> None:
        assert all(self.store.batch_set_v1(_keys(numbers), self.torch.tensor(numbers)))

    def get(self, numbers: Sequence[int]) -> None:
        places = self.torch.tensor([self.pages.count + n for n in numbers])
        assert all(self.store.batch_get_v1(_keys(numbers), places))

    def exists(self, numbers: Sequence[int]) -> int:
        return self.store.batch_exists(_keys(numbers))

    def close(self) -> None:
        self.store.close()


class SglangFile:
    """`HiCacheFile`: buffered, one file a page, published by renaming."""

    def __init__(self, folder: Path, pages: Pages) -> None:
        module = import_module("sglang.srt.mem_cache.hicache_storage")
        torch = import_module("torch")
        self.store = module.HiCacheFile(_config({}), str(folder))
        whole = torch.from_numpy(np.frombuffer(pages.buffer, np.uint8)).reshape(2, pages.count, pages.page_bytes)
        self.sources, self.targets = whole[0], whole[1]

    def set(self, numbers: Sequence[int]) -> None:
        assert self.store.batch_set(_keys(numbers), [self.sources[n] for n in numbers])

    def get(self, numbers: Sequence[int]) -> None:
        got = self.store.batch_get(_keys(numbers), [self.targets[n] for n in numbers])
        assert all(each is not None for each in got)

    def exists(self, numbers: Sequence[int]) -> int:
        return self.store.batch_exists(_keys(numbers))

    def close(self) -> None: ...


def _keys(numbers: Sequence[int]) -> list[str]:
    return [key(n).hex() for n in numbers]


def _config(options: dict[str, object]) -> Any:
    module = import_module("sglang.srt.mem_cache.hicache_storage")
    sizes = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    kind = {"is_mla_model": True, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "bench"}
    return module.HiCacheStorageConfig(**sizes, **kind, extra_config=options)


def sglang_is_here() -> bool:
    """Import SGLang's storage, or say why not."""
    folder = os.environ.get("KVMOVER_PEERS")
    if not folder:
        return False
    sys.path.append(folder)
    from perf.prefix_peers import _without_torchvision as without_torchvision

    try:
        with warnings.catch_warnings(), without_torchvision():
            warnings.simplefilter("ignore")
            import_module("sglang.srt.mem_cache.storage.nixl.hicache_nixl")
    except ImportError as error:
        print(f"no sglang: {error}")
        return False
    return True


@contextmanager
def fresh(folder: Path, make: Callable[[Path], Contender]) -> Iterator[Contender]:
    """A contender in a directory of its own, which is removed afterwards."""
    mine = folder / uuid.uuid4().hex
    mine.mkdir()
    contender = make(mine)
    try:
        yield contender
    finally:
        contender.close()
        shutil.rmtree(mine)
