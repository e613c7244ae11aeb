"""A small API server of Kubernetes: EndpointSlices of services, listed and watched over HTTP like the real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

SERVICE = "kubernetes.io/service-name"


def endpoint_slice(name: str, service: str, hosts: dict[str, bool | None], **ports: int) -> dict[str, Any]:
    """`hosts`: by address, whether it is ready; `ports`: by name, `_` for `-`."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {SERVICE: service}},
        "addressType": "IPv6" if any(":" in host for host in hosts) else "IPv4",
        "endpoints": [
            {"addresses": [host], "conditions": {} if ready is None else {"ready": ready}}
            for host, ready in hosts.items()
        ],
        "ports": [
            {"name": port.replace("_", "-"), "port": number, "protocol": "TCP"} for port, number in ports.items()
        ],
    }


class KubernetesApi:
    """Slices of one namespace, with every change kept for watches. `requests`: what was asked, `refuses`: a status."""

    def __init__(self, namespace: str) -> None:
        self.namespace, self.refuses = namespace, 0
        self.requests: list[dict[str, list[str]]] = []
        self._slices: dict[str, dict[str, Any]] = {}
        self._changes: list[tuple[int, str, dict[str, Any]]] = []
        self._version, self._oldest, self._ended = 1, 0, 0
        self._news = Condition()

    def put(self, found: dict[str, Any]) -> None:
        name = found["metadata"]["name"]
        self._change("MODIFIED" if name in self._slices else "ADDED", found)

    def delete(self, name: str) -> None:
        self._change("DELETED", self._slices[name])

    def end_watches(self, forgets: bool = False) -> None:
        """As a server does after some minutes; `forgets`: earlier versions are too old from now on."""
        with self._news:
            self._ended += 1
            if forgets:
                self._version += 1
                self._oldest = self._version
            self._news.notify_all()

    def _change(self, kind: str, found: dict[str, Any]) -> None:
        with self._news:
            self._version += 1
            found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
            name = found["metadata"]["name"]
            self._slices.pop(name, None)
            if kind != "DELETED":
                self._slices[name] = found
            self._changes.append((self._version, kind, found))
            self._news.notify_all()

    def listed(self, service: str) -> dict[str, Any]:
        with self._news:
            items = [each for each in self._slices.values() if each["metadata"]["labels"][SERVICE] == service]
            return {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSliceList",
                "metadata": {"resourceVersion": str(self._version)},
                "items": items,
            }

    def watched(self, service: str, version: int) -> Iterator[dict[str, Any]]:
        """Changes after `version`, until the watch is ended."""
        with self._news:
            if version < self._oldest:
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                yield {"type": "ERROR", "object": status}
                return
            begun = self._ended
        while True:
            with self._news:
                while self._ended == begun and self._version == version:
                    self._news.wait(30)
                if self._ended > begun:
                    return
                news = [each for each in self._changes if each[0] > version]
                version = self._version
            for _, kind, found in news:
                if found["metadata"]["labels"][SERVICE] == service:
                    yield {"type": kind, "object": found}


@contextmanager
def serving(api: KubernetesApi, folder: Path) -> Iterator[Path]:
    """The kubeconfig by which clients find it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            where = urlsplit(self.path)
            asked = parse_qs(where.query)
            api.requests.append(asked)
            if api.refuses or where.path != f"/apis/discovery.k8s.io/v1/namespaces/{api.namespace}/endpointslices":
                self.answer(api.refuses or 404, {"kind": "Status", "code": api.refuses or 404})
                return
            label, _, service = asked["labelSelector"][0].partition("=")
            assert label == SERVICE
            if "watch" not in asked:
                self.answer(200, api.listed(service))
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in api.watched(service, int(asked["resourceVersion"][0])):
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")
            except OSError:  # the client has left
                self.close_connection = True

        def answer(self, status: int, said: dict[str, Any]) -> None:
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": {"server": address}}],
                "users": [{"name": "me", "user": {}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            }
        ),
        encoding="utf-8",
    )
    try:
        yield config
    finally:
        api.end_watches()
        server.shutdown()
        server.server_close()
        thread.join()
