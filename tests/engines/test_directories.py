"""Engines that come and go: a file is read again when it changes, and a service of Kubernetes is watched over HTTP."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kubernetes_api import KubernetesApi, endpoint_slice, serving

from kvmover.config import ConfigError
from kvmover.engines.common import Directory, open_directory
from kvmover.engines.common import kubernetes_directory as kubernetes


def until(done: Callable[[], object], seconds: float = 20.0) -> None:
    stop = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < stop
        time.sleep(0.01)


def test_a_file_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING, "kvmover")
    path = tmp_path / "engines"
    with closing(open_directory(str(path))) as directory:
        assert directory.engines() == ()
        path.write_text("# two of them\n10.0.0.8:8400\n[FD00:0::7]:8400 # large\n\n")
        assert directory.engines() == ("10.0.0.8:8400", "[fd00::7]:8400")
        path.write_text("10.0.0.8:8400\nhttp://10.0.0.9\n")
        assert directory.engines() == directory.engines() == ("10.0.0.8:8400", "[fd00::7]:8400")
        other = tmp_path / "next"  # as Kubernetes replaces a mounted map
        other.write_text("10.0.0.9:8400\n")
        os.replace(other, path)
        assert directory.engines() == ("10.0.0.9:8400",)
        path.unlink()
        assert directory.engines() == ("10.0.0.9:8400",)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3, said  # each once: not there yet, a bad line, gone
    assert "http://10.0.0.9" in said[1]


@pytest.fixture
def api() -> KubernetesApi:
    return KubernetesApi("chat")


@pytest.fixture
def opened(api: KubernetesApi, tmp_path: Path, monkeypatch) -> Iterator[Callable[[str], Directory]]:
    monkeypatch.setattr(kubernetes, "_PAUSE_S", 0.05)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with ExitStack() as stack:
        monkeypatch.setenv("KUBECONFIG", str(stack.enter_context(serving(api, tmp_path))))
        yield lambda where: stack.enter_context(closing(open_directory(where)))


def test_the_ready_pods_of_a_service_are_its_engines_as_they_come_and_go(api, opened) -> None:
    api.put(
        endpoint_slice("a", "prefill", {"10.0.0.1": True, "10.0.0.2": False, "10.0.0.3": None}, kv_peers=8400, http=80)
    )
    api.put(endpoint_slice("b", "prefill", {"fd00::1": True}, kv_peers=8401))
    api.put(endpoint_slice("c", "decode", {"10.0.1.1": True}, kv_peers=8400))
    directory = opened("kubernetes://chat/prefill/kv-peers")
    until(lambda: directory.engines() == ("10.0.0.1:8400", "10.0.0.3:8400", "[fd00::1]:8401"))
    api.put(endpoint_slice("a", "prefill", {"10.0.0.1": True, "10.0.0.2": True}, kv_peers=8400))
    until(lambda: directory.engines() == ("10.0.0.1:8400", "10.0.0.2:8400", "[fd00::1]:8401"))
    api.delete("b")
    api.put(endpoint_slice("d", "prefill", {"10.0.0.9": True}, kv_peers=8400))
    until(lambda: directory.engines() == ("10.0.0.1:8400", "10.0.0.2:8400", "10.0.0.9:8400"))
    assert [("watch" in asked) for asked in api.requests] == [False, True]  # changes come by the one watch


def test_a_port_may_be_a_number_and_a_service_without_the_port_has_no_engine(api, opened) -> None:
    api.put(endpoint_slice("a", "prefill", {"10.0.0.1": True}, http=80))
    by_number, by_name = opened("kubernetes://chat/prefill/8400"), opened("kubernetes://chat/prefill/kv-peers")
    until(lambda: by_number.engines() == ("10.0.0.1:8400",))
    until(lambda: sum("watch" in asked for asked in api.requests) == 2)
    assert by_name.engines() == ()


@pytest.mark.parametrize("forgets", [False, True], ids=["the server ends a watch", "and forgets what was before"])
def test_a_watch_that_ends_is_begun_again_and_misses_no_change(api, opened, forgets: bool) -> None:
    api.put(endpoint_slice("a", "prefill", {"10.0.0.1": True}, kv_peers=8400))
    directory = opened("kubernetes://chat/prefill/kv-peers")
    until(lambda: any("watch" in asked for asked in api.requests))
    api.end_watches(forgets)
    api.put(endpoint_slice("b", "prefill", {"10.0.0.2": True}, kv_peers=8400))
    until(lambda: directory.engines() == ("10.0.0.1:8400", "10.0.0.2:8400"))


def test_a_server_that_refuses_leaves_the_engines_as_they_were_and_is_told_once(api, opened, caplog) -> None:
    caplog.set_level(logging.WARNING, "kvmover")
    api.put(endpoint_slice("a", "prefill", {"10.0.0.1": True}, kv_peers=8400))
    directory = opened("kubernetes://chat/prefill/kv-peers")
    until(lambda: any("watch" in asked for asked in api.requests))
    api.refuses = 403
    before = len(api.requests)
    api.end_watches()
    until(lambda: len(api.requests) > before + 3)
    assert directory.engines() == ("10.0.0.1:8400",)
    assert len([each for each in caplog.records if "stay as they were" in each.getMessage()]) == 1
    api.refuses = 0
    api.put(endpoint_slice("a", "prefill", {"10.0.0.4": True}, kv_peers=8400))
    until(lambda: directory.engines() == ("10.0.0.4:8400",))


@pytest.mark.parametrize(
    "where", ["kubernetes://chat", "kubernetes://chat/prefill", "kubernetes://a/b/c/d", "kubernetes:///b/c"]
)
def test_a_service_that_is_named_otherwise_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="NAMESPACE/SERVICE/PORT"):
        open_directory(where)


def test_without_the_client_or_a_cluster_the_setting_is_refused_by_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"peers\.directory: no cluster, and no kubeconfig"):
        open_directory("kubernetes://chat/prefill/8400")
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[kubernetes\]"):
        open_directory("kubernetes://chat/prefill/8400")
