"""NVIDIA's KVCR, by its own client, and engines of ours at each other's addresses: no page moves, and nobody is hurt.

KVCR reads by another protocol, from engines of its own kind alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvmover.cache.peers import PeerMiss
from kvmover.engines.common import fetch_cards
from kvmover.errors import TransportError
from kvmover.layout import Fleet
from tests.engines.test_neighbours import SmallEngine, addresses, asked, read
from tests.live.server import free_port

HOME = Path(__file__).parents[3] / ".orchestrators" / "kvcr"

pytestmark = pytest.mark.skipif(not (HOME / ".ready").exists(), reason="needs NVIDIA's KVCR: `make indexer`")

_BLOCKS, _BLOCK_BYTES = 4, 4096


def command(*words: object) -> list[str]:
    return [str(HOME / "bin" / "python"), str(Path(__file__).with_name("kvcr_client.py")), *map(str, words)]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"NIXL_PORT": str(free_port()), "UCX_TLS": "tcp,sm,self"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a source of KVCR's own."""
    port, log = free_port(), (tmp_path_factory.mktemp("kvcr") / "log").open("w")
    with (
        log,
        subprocess.Popen(command("serve", port), stdout=subprocess.PIPE, stderr=log, env=environment()) as process,
    ):
        assert process.stdout is not None
        while (line := process.stdout.readline()) != b"ready\n":
            assert line, Path(log.name).read_text()
        yield f"127.0.0.1:{port}"
        process.terminate()


def blocks_from(address: str) -> tuple[list[str], int]:
    """What KVCR's client gets from an address: the outcome of each block, and the bytes that were written."""
    asked = command("ask", free_port(), f"tcp://{address}")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return said["blocks"], said["written"]


def test_kvcr_reads_from_its_own_kind(source: str) -> None:
    assert blocks_from(source) == (["SUCCESS"] * _BLOCKS, _BLOCKS * _BLOCK_BYTES)


def test_kvcr_gets_no_page_of_an_engine_of_ours_and_the_engine_goes_on_lending() -> None:
    both = addresses(2)
    lender = SmallEngine(Fleet(page_tokens=4), both[0], [])
    with closing(lender):
        lender.fill()
        assert blocks_from(both[0]) == (["FAILED"] * _BLOCKS, 0)
        with closing(SmallEngine(Fleet(tp=2, page_tokens=8), both[1], [], allow=["127.0.0.1"])) as borrower:
            assert read(borrower, 0, both[0]) == 16


def test_an_engine_of_ours_gets_no_page_of_kvcr_and_kvcr_goes_on_serving(source: str) -> None:
    with pytest.raises(TransportError, match=f"no cards from {source}: ") as raised:
        fetch_cards(*source.split(":")[:1], int(source.split(":")[1]))
    assert str(raised.value).isprintable()
    with closing(SmallEngine(Fleet(page_tokens=4), *addresses(1), [], allow=["127.0.0.1"])) as borrower:
        (answer,) = asked(borrower, 0, "r", source)
        assert (answer.tokens, answer.miss) == (0, PeerMiss.UNREACHABLE)
    assert blocks_from(source)[0] == ["SUCCESS"] * _BLOCKS
