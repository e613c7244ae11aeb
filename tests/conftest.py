"""Settings that all tests share, and a line on what a run leaves to other targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import proofs
from tests.mooncake_home import find_mooncake

# No test is a measurement: a busy machine fails none.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

find_mooncake()

#: What pyproject.toml leaves out of a run that names no markers, and the target that runs it.
TARGETS = {"proof": "make prove", "night": "make night", "engine": "make engines"}
_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = {}
    proofs.effort = proofs.Effort.of(config.option.markexpr)


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Counted before `-m` takes them away."""
    for mark in TARGETS:
        count = sum(item.get_closest_marker(mark) is not None for item in items)
        if count and f"not {mark}" in config.option.markexpr:
            config.stash[_LEFT_OUT][mark] = count


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: Any = session.config
    if hasattr(output, "workeroutput"):
        output.workeroutput["left_out"] = output.stash[_LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker has seen them all."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for mark, count in config.stash[_LEFT_OUT].items():
        terminalreporter.write_line(f"{count} tests are left to `{TARGETS[mark]}` (-m {mark})")
