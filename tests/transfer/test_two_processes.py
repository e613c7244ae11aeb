"""Real processes over NIXL: both routes, strangers, deaths, and fifty lives that leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvmover.plan import Route

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from tests.transfer.process_end import End, running

#: A death has to be noticed long before the deadline of 20 s.
NOTICED_S = 8.0


def test_both_routes_land_the_same_bytes_and_leave_the_neighbours_alone():
    with running("prefill") as prefill, running("decode") as decode:
        decode.call("connect", prefill.call("card"))
        before = decode.call("neighbours")
        for route in Route:
            decode.call("take", route)
            prefill.call("offer", f"by {route}")
            decode.call("ask", f"by {route}")
            decode.tell("finish", f"by {route}")
            assert prefill.call("finish", f"by {route}").landed
            result = decode.answer()
            assert result.landed
            assert result.routes == (route,)
            assert decode.call("digest") == prefill.call("digest")
            assert decode.call("neighbours") == before


def test_a_peer_with_another_model_is_refused_with_both_names():
    with running("prefill", "llama") as prefill, running("decode", "qwen") as decode:
        card = prefill.call("card")
        with pytest.raises(AssertionError, match=r"PeerRefused: peer holds llama .*; this side holds qwen"):
            decode.call("connect", card)


def test_a_killed_source_ends_the_request_before_its_deadline():
    with running("prefill") as prefill, running("decode") as decode:
        decode.call("connect", prefill.call("card"))
        decode.call("ask", "orphan")
        prefill.process.kill()
        began = time.monotonic()
        result = decode.call("finish", "orphan")
        assert time.monotonic() - began < NOTICED_S
        assert not result.landed
        assert "prefill" in result.reason
        assert not result.held


def test_a_killed_destination_ends_the_offer_before_its_deadline():
    with running("prefill") as prefill, running("decode") as decode:
        decode.call("connect", prefill.call("card"))
        decode.call("ask", "widow")
        prefill.call("hear", "decode")
        decode.process.kill()
        decode.process.join(10)
        prefill.call("offer", "widow")
        began = time.monotonic()
        result = prefill.call("finish", "widow")
        assert time.monotonic() - began < NOTICED_S
        assert not result.landed
        assert "decode" in result.reason


def test_fifty_lives_leave_no_descriptor_process_or_registration():
    """Start, connect, move, close, in one process, against a peer that lives on."""
    with running("decode") as decode:
        counts: list[int] = []
        for life in range(50):
            end = End("prefill")
            decode.call("connect", end.card())
            decode.call("ask", f"life {life}")
            decode.tell("finish", f"life {life}")
            end.offer(f"life {life}")
            result = end.finish(f"life {life}")
            assert result is not None
            assert result.landed
            assert decode.answer().landed
            end.close()
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
        assert decode.call("digest") == end.digest()
        assert counts[-1] <= counts[9], counts  # the first lives open what NIXL keeps for the process
        assert len(multiprocessing.active_children()) == 1
        mapped = Path(f"/proc/{os.getpid()}/maps").read_text().count("\n")
        assert mapped < 20000
