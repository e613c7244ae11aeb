"""The plain server that all files compare with; and servers end by a kill, for to stop takes SGLang seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_servers import sglang


@pytest.fixture(scope="session")
def plain(model: ModelMaker) -> Iterator[Server]:
    """Begun and not waited for, so that what is compared with it starts beside it."""
    server = Server.start(sglang("sglang-plain", model("llama", "sglang")))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    started = Servers()
    try:
        yield started
    finally:
        for server in started.running:
            server.kill()
