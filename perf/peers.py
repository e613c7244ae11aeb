"""Peers' kernels, taken from an installed package or a checkout at run time; nothing of theirs is kept here.

SGLang's staging kernels are loaded alone, because their module imports the whole engine. `KVMOVER_PEERS` names a folder
that holds `sglang/`; without it, and without sglang installed, there is no peer and the benchmarks say so.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

STAGING = "srt/disaggregation/common/staging_buffer.py"
KERNELS = ("_fused_gather_to_staging_kernel", "_fused_scatter_from_staging_kernel")

#: What the proposal of sglang#39236 comes to: the pointer that was loaded from a table is promised to be aligned.
UNALIGNED = "tl.load(layer_ptrs + {}).to(staging.dtype)"


def sglang_staging() -> dict[str, ModuleType]:
    """`released` and `aligned`: modules with SGLang's two kernels. Empty when there is no SGLang."""
    path = _find()
    if path is None:
        return {}
    tree = ast.parse(path.read_text())
    parts = [ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in KERNELS]
    source = "\n\n".join(["import triton\nimport triton.language as tl", *parts])
    aligned = source
    for index in ("layer_id", "layer_kv_id"):
        aligned = aligned.replace(UNALIGNED.format(index), f"tl.multiple_of({UNALIGNED.format(index)}, 16)")
    return {"released": _module("sglang_released", source), "aligned": _module("sglang_aligned", aligned)}


def sglang_release() -> str:
    """Returns SGLang's release, or the commit of its checkout, and a hash of the source of its kernels."""
    path = _find()
    assert path is not None
    home = path.parents[len(Path(STAGING).parts)]
    released = [each.version for each in distributions(name="sglang", path=[str(home)])]
    git = ["git", "-C", str(path.parent), "describe", "--always", "--tags"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    source = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return f"sglang {(released or [commit or 'of no known release'])[0]}, source {source}"


def _find() -> Path | None:
    folders = [Path(os.environ[name]) / "sglang" for name in ("KVMOVER_PEERS",) if name in os.environ]
    spec = importlib.util.find_spec("sglang")
    folders += [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return next((folder / STAGING for folder in folders if (folder / STAGING).is_file()), None)


def _module(name: str, source: str) -> ModuleType:
    """Triton reads a kernel's source from its file, so there has to be one."""
    path = Path(tempfile.mkdtemp(prefix="kvmover-peer-")) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
