"""The plain server that most files compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.conftest import ModelMaker
from tests.live.server import Server
from tests.live.vllm_servers import vllm


@pytest.fixture(scope="session")
def plain(model: ModelMaker) -> Iterator[Server]:
    """Begun and not waited for, so that what is compared with it starts beside it."""
    server = Server.start(vllm("vllm-plain", model("qwen3", "vllm")))
    try:
        yield server
    finally:
        server.stop()
