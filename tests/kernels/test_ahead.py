"""Work that is announced is done once, before it is asked for; other work when it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ahead import Ahead


def test_announced_work_is_done_once_and_what_it_raises_is_raised_where_it_is_asked_for() -> None:
    done: list[str] = []

    def work(value: str) -> str:
        done.append(value)
        if value == "skipped":
            pytest.skip("not here")
        return value.upper()

    module = SimpleNamespace(__name__="module", AHEAD={"case": work})
    specs = [SimpleNamespace(params={"case": case}) for case in ("a", "skipped", "a")]
    items = [SimpleNamespace(module=module, callspec=spec) for spec in specs]
    ahead = Ahead()
    ahead.announce(cast(Any, [*items, SimpleNamespace(module=module), SimpleNamespace()]))
    assert ahead.result(module, "case", "a") == "A"
    with pytest.raises(pytest.skip.Exception, match="not here"):
        ahead.result(module, "case", "skipped")
    assert done == ["a", "skipped"]
    assert ahead.result(module, "case", "b") == "B"
    ahead.close()
    assert done == ["a", "skipped", "b"]
