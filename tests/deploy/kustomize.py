"""The part of kustomize that deploy/kubernetes uses: resources, components with a patch, generators, names of images.

`kubectl kustomize` does the same where there is one, and a test compares the two.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

#: By which field a patch finds an element of a list, as Kubernetes merges lists.
_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath", "ports": "containerPort"}
_KNOWN = {
    *("apiVersion", "kind", "resources", "components", "patches"),
    *("namespace", "images", "configMapGenerator", "secretGenerator"),
}


def composed(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization, with generated names as they are written, without the digest behind them."""
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert {*said} <= _KNOWN, f"{folder} uses what this reader does not know: {sorted({*said} - _KNOWN)}"
    objects = [each for name in said.get("resources", ()) for each in _resource(folder / name)]
    for name in said.get("components", ()):
        objects = [_patched(each, folder / name) for each in objects]
    objects += [_generated(each, "ConfigMap", folder) for each in said.get("configMapGenerator", ())]
    objects += [_generated(each, "Secret", folder) for each in said.get("secretGenerator", ())]
    images = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in said.get("images", ())}
    for each in objects:
        if "namespace" in said:
            each["metadata"]["namespace"] = said["namespace"]
        for container in containers_of(each):
            container["image"] = images.get(container["image"], container["image"])
    return objects


def containers_of(each: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers of a workload; none of other objects."""
    return each.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])


def _resource(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        yield from composed(path)
    else:
        yield from yaml.safe_load_all(path.read_text())


def _patched(each: dict[str, Any], component: Path) -> dict[str, Any]:
    for patch in yaml.safe_load((component / "kustomization.yaml").read_text())["patches"]:
        label, _, value = patch["target"]["labelSelector"].partition("=")
        labels = each["metadata"].get("labels", {})
        if each["kind"] == patch["target"]["kind"] and labels.get(label) == value:
            more = yaml.safe_load((component / patch["path"]).read_text())
            each = _merged(each, {"spec": more["spec"]}, "")
    return each


def _merged(old: Any, new: Any, name: str) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _merged(old.get(key), new[key], key) if key in new else old[key] for key in (*old, *new)}
    if isinstance(old, list) and name in _KEYS:
        key, ours = _KEYS[name], {each[_KEYS[name]]: each for each in old}
        return [_merged(ours.get(each[key]), each, "") for each in new] + [
            each for each in old if each[key] not in {every[key] for every in new}
        ]
    return new


def _generated(each: dict[str, Any], kind: str, folder: Path) -> dict[str, Any]:
    files = {name: (folder / name).read_bytes() for name in each["files"]}
    data = {
        name: base64.b64encode(text).decode() if kind == "Secret" else text.decode() for name, text in files.items()
    }
    more = {"type": "Opaque"} if kind == "Secret" else {}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": each["name"]}, "data": data, **more}
