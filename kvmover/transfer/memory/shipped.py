"""A wheel brings machine code: the general kernels, the conversions of public models, and all kernels of flagships.

`python -m kvmover.transfer.memory.shipped FOLDER` compiles them for each architecture, or for those named after it. A
mover that finds them begins without a compiler, whatever public model it moves.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvmover.kernels import digest, rows
from kvmover.kernels.ahead_of_time import Worker
from kvmover.kernels.code_store import keep
from kvmover.kernels.launch import Program
from kvmover.layout import Codec, Component, Fleet, PoolSpec
from kvmover.plan.model_config import cache_of
from kvmover.plan.public_models import PUBLIC
from kvmover.regions import BoundMemory
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.memory.programs import OwnMemory, Rules, Way, programs_between
from kvmover.transfer.memory.work import Programs
from kvmover.transfer.protocol.chunks import End

#: The GPUs that code is shipped for: sm_80 is of an A100, sm_90 of an H100 and H200, sm_100 of a B200.
ARCHITECTURES = (80, 90, 100, 120)

#: Models whose kernels are all shipped, for pages of these sizes, tensor parallelism and orders. Most others have the
#: same: Llama's are Qwen3's and MiniMax', DeepSeek-V3's are Kimi's.
FLAGSHIPS = ("llama-3-70b", "deepseek-v3", "deepseek-v3.2")
PAGE_TOKENS, TP, ORDERS = (16, 64), (1, 2, 4, 8), ("NHD", "HND")

#: Components that engines keep in fp8.
CONVERTED = ("attention", "sliding", "mla")

#: Pages of a pool, and bytes of an arena, for sample requests of one layer: pages repeat, no byte is moved.
PAGES, ARENA_BYTES = 4, 64 << 20


def programs(architecture: int) -> set[Program]:
    """Returns the kernels for sm_`architecture` that a wheel has machine code of."""
    return {_on(architecture, program) for program in _chosen()}


@cache
def _chosen() -> frozenset[Program]:
    general = rows.general_program(), digest.general_program(), digest.general_program("src")
    return frozenset({*general, *_conversions(), *_flagships()})


def _on(architecture: int, program: Program) -> Program:
    """Returns a program, chosen on a CPU, as it is on a GPU: see `convert.casts`."""
    constants = tuple(
        (name, int(architecture >= 90)) if name == "CASTS" else (name, value) for name, value in program.constants
    )
    return replace(program, constants=constants)


def _conversions() -> Iterator[Program]:
    """Yields the kernels between each public model's attention as it is and in the fp8 forms that engines keep."""
    for config in PUBLIC.values():
        meant = [each for each in _one_layer(config) if each.name in CONVERTED and each.dtype == "bfloat16"]
        for narrow in _narrow(meant):
            for way, pair in ((Way.GATHER, (meant, narrow)), (Way.SCATTER, (narrow, meant))):
                found = _between(way, *map(_end, pair, (Fleet(page_tokens=16),) * 2, ("NHD", "NHD")))
                yield from (each for each in (found.convert, found.convert_digest) if each is not None)


def _narrow(meant: Sequence[Component]) -> Iterator[Sequence[Component]]:
    """Yields a model's attention in each form of fp8."""
    of_latents = Codec.fp8_ds_mla()
    if meant:
        yield [each.kept_as(Codec.fp8(each.dtype, each.dim)) for each in meant]
    if {each.dim for each in meant} == {of_latents.dim}:
        yield [each.kept_as(of_latents) for each in meant]


def _flagships() -> Iterator[Program]:
    """Yields the kernels of the flagships."""
    for name in FLAGSHIPS:
        components = _one_layer(PUBLIC[name])
        fleets = [Fleet(tp=tp, page_tokens=page_tokens) for tp in TP for page_tokens in PAGE_TOKENS]
        ends = [_end(components, fleet, order) for fleet in fleets for order in ORDERS]
        for src, dst in itertools.product(ends, repeat=2):
            for way in (Way.GATHER, Way.SCATTER):
                yield from _between(way, src, dst).all()


def _one_layer(config: Mapping[str, Any]) -> Sequence[Component]:
    """Returns a model's components with a layer each: kernels do not depend on layers."""
    return [replace(each, layers=1) for each in cache_of(config).components]


def _end(components: Sequence[Component], fleet: Fleet, order: str) -> End:
    """Returns rank 0 of a fleet, with a few pages of each component."""
    specs = (
        PoolSpec.dense(each, fleet.shard(each, 0, 1), PAGES, fleet.page_rows(each), order, ("layer", "kv"))
        for each in components
    )
    return End(fleet, 0, tuple(specs))


def _between(way: Way, src: End, dst: End) -> Programs:
    """Returns the kernels of rank 0 of either fleet, with digests, under a mover's usual budget."""
    own = src if way is Way.GATHER else dst
    pools = tuple(_untouched(spec.allocations, spec.allocation_bytes) for spec in own.pools)
    arena = _untouched(1, ARENA_BYTES)
    memory, usual = OwnMemory(pools, arena, arena), MoverConfig()
    found = programs_between(way, src, dst, memory, Rules(usual.replicas, usual.sms, digests=True))
    return found or Programs()


def _untouched(allocations: int, nbytes: int) -> BoundMemory:
    """Returns memory that has addresses, and takes no page of the machine."""
    return BoundMemory(tuple(torch.empty(nbytes, dtype=torch.uint8) for _ in range(allocations)))


def compile_all(wanted: Sequence[tuple[Program, int]], folder: Path) -> None:
    """Compile programs, each for an architecture, into a folder: as many at once as there are cores. Raises
    CompileError.
    """
    here, workers = threading.local(), list[Worker]()

    def one(program: Program, architecture: int) -> None:
        if not hasattr(here, "worker"):
            here.worker = Worker()
            workers.append(here.worker)
        keep(program.shipped_name(architecture), here.worker.compile(program, architecture), folder)

    # Those of most shapes first, so that no core is left with one of them.
    ordered = sorted(wanted, key=lambda each: len(each[0].shapes), reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        done = [threads.submit(one, *each) for each in ordered]
        try:
            for each in done:
                each.result()
        finally:
            for each in done:
                each.cancel()
    for worker in workers:
        worker.rest()


def main() -> None:
    """Compile all that a wheel brings."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("architectures", type=int, nargs="*", default=ARCHITECTURES)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        # The compiling processes inherit both. Lines of the source would be two thirds of the code.
        os.environ.update(TRITON_CACHE_DIR=cache, TRITON_DISABLE_LINE_INFO="1")
        wanted = [(program, each) for each in chosen.architectures for program in programs(each)]
        compile_all(wanted, chosen.folder)


if __name__ == "__main__":
    main()
