"""Progress threads over NIXL between two spawned processes: many callers, equal bytes, little work, a clean end."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from progress_peer import ThreadedProcess

pytestmark = pytest.mark.timeout(90)

REQUESTS, TOKENS = 6, 96

#: Pages of 16 tokens in NHD and of 24 in HND. None is in two requests; in the destination every second is in none.
SRC_PAGES = {f"request-{n}": [12 * n - 2 * page for page in range(6)] for n in range(1, REQUESTS // 2 + 1)}
SRC_PAGES |= {f"request-{n}": [12 * (n - 3) - 2 * page - 1 for page in range(6)] for n in range(4, REQUESTS + 1)}
DST_PAGES = {f"request-{n}": [8 * n + 2 * page + 1 for page in range(4)] for n in range(1, REQUESTS + 1)}


def test_threads_send_and_tasks_receive_and_processes_leave_as_they_please():
    source, target = ThreadedProcess("prefill", 16, "NHD"), ThreadedProcess("decode", 24, "HND")
    assert target.ask("connect", source.ask("card")).startswith("prefill.")
    filled = source.ask("fill_all", list(SRC_PAGES.values()), TOKENS)
    assert len(set(filled)) == REQUESTS
    source.tell("send_from_threads", SRC_PAGES)
    assert target.ask("receive_in_tasks", DST_PAGES, "prefill", TOKENS) == [None] * REQUESTS
    assert source.answer() == [None] * REQUESTS
    assert target.ask("digests", list(DST_PAGES.values()), TOKENS) == filled
    assert source.ask("polls_while_idle", 0.3) < 60
    source.ask("close")
    assert source.leave() == 0
    assert target.leave() == 0  # with its thread running
