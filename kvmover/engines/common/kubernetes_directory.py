"""A KubernetesDirectory reads the engines of a service from its EndpointSlices, by Kubernetes' own client.

It lists them once and watches from there, in a thread, so that the API server is asked again only as pods come and go.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from importlib import import_module
from threading import Event, Lock, Thread
from typing import Any

from kvmover.config import ConfigError
from kvmover.config.settings import canonical_address
from kvmover.errors import how_to_install
from kvmover.foreign_text import printable
from kvmover.repeats import Repeats, form_of

log = logging.getLogger(__name__)

#: A watch that the server may end, and the client's limit of a silent one, s.
_WATCH_S, _SILENCE_S = 300, 330.0

#: The limit of connecting and of a list, s, and the pause after an error.
_CALL_S, _PAUSE_S = 5.0, 2.0

#: The most characters of an error, which has the server's whole answer.
_MOST_SAID = 400


def addresses_of(slices: Iterable[Any], port: str) -> tuple[str, ...]:
    """Returns the addresses of the ready endpoints in V1EndpointSlices, sorted, each once.

    `port`: a number, or the name of a port, without which a slice has no address. An endpoint whose readiness is
    unknown counts as ready, as Kubernetes has it.
    """
    found = set[str]()
    for each in slices:
        number = int(port) if port.isdecimal() else None
        for known in each.ports or () if number is None else ():
            if known.name == port:
                number = known.port
        for endpoint in each.endpoints or () if number is not None else ():
            if endpoint.conditions is None or endpoint.conditions.ready is not False:
                hosts = (f"[{host}]" if ":" in host else host for host in endpoint.addresses or ())
                found |= {canonical_address(f"{host}:{number}") for host in hosts}
    return tuple(sorted(found))


class KubernetesDirectory:
    """The ready pods of a service, at one port. `api`: the client's DiscoveryV1Api, which this directory closes.

    A server that cannot be reached is told in the log, at most once a minute, and the last pods stay.
    """

    def __init__(self, api: Any, namespace: str, service: str, port: str) -> None:
        self._api, self._namespace, self._service, self._port = api, namespace, service, port
        self._watch_kind: Any = import_module("kubernetes.watch").Watch
        wire: Any = import_module("urllib3.exceptions")
        self._failures = import_module("kubernetes.client").ApiException, wire.HTTPError, OSError, ValueError
        self._slices: dict[str, Any] = {}
        self._engines: tuple[str, ...] = ()
        self._repeats, self._over, self._lock = Repeats(), Event(), Lock()
        self._watch: Any = None
        self._thread = Thread(target=self._run, daemon=True, name="kvmover-directory")
        self._thread.start()

    @classmethod
    def open(cls, namespace: str, service: str, port: str) -> KubernetesDirectory:
        """Returns a directory by the pod's service account, or else by the kubeconfig (KUBECONFIG).

        Raises ConfigError without the client, or without either.
        """
        try:
            client, config = import_module("kubernetes.client"), import_module("kubernetes.config")
        except ImportError as error:
            raise ConfigError(f"peers.directory needs Kubernetes' client: {how_to_install('kubernetes')}") from error
        settings: Any = client.Configuration()
        try:
            try:
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException:
                config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=settings)  # as it is now
        except config.ConfigException as error:
            raise ConfigError(f"peers.directory: no cluster, and no kubeconfig: {error}") from error
        settings.retries = False
        return cls(client.DiscoveryV1Api(client.ApiClient(settings)), namespace, service, port)

    def engines(self) -> tuple[str, ...]:
        """Returns the addresses of the pods that were ready at the last change."""
        return self._engines

    def close(self) -> None:
        """End the watch and the thread. Safe to call twice."""
        self._over.set()
        with self._lock:
            if self._watch is not None:
                self._watch.stop()
        self._thread.join(_CALL_S)
        self._api.api_client.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._follow(self._list())
            except self._failures as error:
                self._say(error)
                self._over.wait(_PAUSE_S)

    def _list(self) -> str:
        """List the slices. Returns the version to watch from."""
        found = self._api.list_namespaced_endpoint_slice(
            self._namespace, label_selector=self._selector, _request_timeout=_CALL_S
        )
        self._slices = {each.metadata.name: each for each in found.items}
        self._renew()
        return found.metadata.resource_version

    def _follow(self, version: str) -> None:
        """Take changes until the server ends the watch. Raises the client's errors, also 410: too old a version."""
        with self._lock:
            if self._over.is_set():
                return
            watch = self._watch = self._watch_kind()
        for event in watch.stream(
            self._api.list_namespaced_endpoint_slice,
            self._namespace,
            label_selector=self._selector,
            resource_version=version,
            timeout_seconds=_WATCH_S,
            _request_timeout=(_CALL_S, _SILENCE_S),
        ):
            name = event["object"].metadata.name
            if event["type"] == "DELETED":
                self._slices.pop(name, None)
            else:
                self._slices[name] = event["object"]
            self._renew()

    @property
    def _selector(self) -> str:
        return f"kubernetes.io/service-name={self._service}"

    def _renew(self) -> None:
        engines = addresses_of(self._slices.values(), self._port)
        if engines != self._engines:
            self._engines = engines
            log.info("service %s/%s has %d engines", self._namespace, self._service, len(engines))

    def _say(self, error: Exception) -> None:
        if self._over.is_set():
            return
        words = printable(f"{type(error).__name__}: {error}", _MOST_SAID)
        if (more := self._repeats.more(form_of(words), time.monotonic())) is not None:
            log.warning(
                "the %d engines of service %s/%s stay as they were: %s%s",
                len(self._engines),
                self._namespace,
                self._service,
                words,
                more,
            )
