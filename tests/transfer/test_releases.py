"""Two releases, one of which lacks the newest message and the newest field, move the same bytes both ways over NIXL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from mover_peer import MoverProcess

pytestmark = pytest.mark.timeout(120)

TOKENS = 400
SRC_PAGES = [63 - 2 * n for n in range(25)]
DST_PAGES = [2 * n + 1 for n in range(17)]
SECRET = bytes(range(64))

Processes = dict[tuple[str, str], MoverProcess]


@pytest.fixture(scope="module", params=[b"", SECRET], ids=["not sealed", "sealed"])
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """A prefill and a decode of each release, all connected."""
    started = {
        (side, release): MoverProcess(
            f"{side}-{release}", page_tokens, order, None, "toy", "zeros", ("auto", 0.0), release, request.param
        )
        for side, page_tokens, order in (("prefill", 16, "NHD"), ("decode", 24, "HND"))
        for release in ("before", "now")
    }
    for (side, _), process in started.items():
        for (other, release), peer in started.items():
            if (side, other) == ("decode", "prefill"):
                assert process.ask("connect", peer.ask("card")).startswith(f"prefill-{release}.")
    yield started
    assert [process.leave() for process in started.values()] == [0] * 4


@pytest.mark.parametrize("source", ["before", "now"])
@pytest.mark.parametrize("target", ["before", "now"])
def test_bytes_are_equal_and_no_message_is_said_that_the_other_lacks(
    processes: Processes, source: str, target: str
) -> None:
    prefill, decode = processes["prefill", source], processes["decode", target]
    noted = decode.ask("kinds_heard").get("Noted", 0)
    sent = prefill.ask("fill", len(source + target), SRC_PAGES, TOKENS)
    name = f"{source}-{target}"
    wants = prefill.ask("kinds_heard").get("Want", 0)
    decode.ask("receive", name, f"prefill-{source}", 0, TOKENS, DST_PAGES)
    while prefill.ask("kinds_heard").get("Want", 0) == wants:  # it notes a Want that comes before the send
        time.sleep(0.01)
    prefill.ask("send", name, SRC_PAGES)
    for process in (decode, prefill):
        assert process.ask("outcome", name, 20)[0].startswith("landed")
        assert process.ask("malformed") == 0
    assert decode.ask("digest", DST_PAGES, TOKENS) == sent
    said = decode.ask("kinds_heard").get("Noted", 0) - noted
    assert (said > 0) == (source == target == "now"), "Noted is of the newest release"
