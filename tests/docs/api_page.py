"""docs/api.md, written from the public names and their docstrings. `python -m tests.docs.api_page` updates the page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"

#: The packages whose `__all__` is promised, in the order of the page, and what belongs to which heading.
PACKAGES = (
    "kvmover",
    "kvmover.layout",
    "kvmover.plan",
    "kvmover.transport",
    "kvmover.transfer",
    "kvmover.transfer.rendezvous",
    "kvmover.store",
    "kvmover.cache.prefix",
    "kvmover.cache.ledger",
    "kvmover.cache.tiers",
    "kvmover.cache.replay",
    "kvmover.config",
)

#: Modules without an `__all__`, of which every class is promised.
WHOLE = ("kvmover.errors",)

#: Values and aliases have no docstring.
TEXTS = {
    "kvmover.__version__": "The version, as a string.",
    "kvmover.layout.AXES": "The six words an order string is made of: layer, kv, page, head, token, dim.",
    "kvmover.layout.DTYPE_BYTES": "Bytes of an element, by torch's name of the dtype.",
    "kvmover.layout.EMPTY": "The span of nothing.",
    "kvmover.layout.ORDERS": "`NHD` and `HND` as strings of six words.",
    "kvmover.layout.PACKED_AXES": "The words of `PACKED_ORDER` as a tuple, outermost first.",
    "kvmover.layout.PACKED_ORDER": "The order on the wire and in the store: `page head layer kv token dim`.",
    "kvmover.layout.Positions": "A tuple of Stripes: which tokens, in order.",
    "kvmover.plan.HOST": "Assumed costs between processes of one host.",
    "kvmover.plan.RDMA": "Assumed costs between GPUs over 400 Gb/s RDMA.",
    "kvmover.transport.MAX_NOTE_BYTES": "The longest note a transport carries.",
    "kvmover.transport.Event": "What `poll` returns: a Note, or that an operation Completed or Failed.",
    "kvmover.transfer.rendezvous.Change": "An Appeared or a Vanished.",
    "kvmover.store.HASH_BYTES": "Bytes of a page's hash: 32.",
    "kvmover.store.GotResult": "What became of one page of a `get`: the outcome, and the reason of a bad one.",
    "kvmover.store.PutResult": "What became of one page of a `put`: the outcome, and the reason of a bad one.",
    "kvmover.store.this_machine": "This machine and its boot: who may believe unsynced objects.",
    "kvmover.cache.prefix.EARNED": "Eviction: what was used twice stays about twice as long.",
    "kvmover.cache.prefix.FIFO": "Eviction: first in, first out.",
    "kvmover.cache.prefix.FULL": "The name of the component that every page has: attention KV.",
    "kvmover.cache.prefix.KVEvent": "A BlockStored, a BlockRemoved or an AllBlocksCleared.",
    "kvmover.cache.prefix.LFU": "Eviction: least often used first.",
    "kvmover.cache.prefix.LRU": "Eviction: least recently used first.",
    "kvmover.cache.prefix.POLICIES": "The eviction policies by name.",
    "kvmover.cache.prefix.PRIORITY": "Eviction: lowest priority first.",
    "kvmover.cache.prefix.ROOT": "The id of the tree's root.",
    "kvmover.cache.prefix.SLRU": "Eviction: what was never hit again goes before what was.",
    "kvmover.cache.ledger.EVERYBODY": "The group of requests that name no tenant and no model.",
    "kvmover.cache.tiers.ALL_PAGES": "A prefix needs every page.",
    "kvmover.cache.tiers.LAST_PAGE": "A prefix needs its last page only: states.",
    "kvmover.cache.tiers.SOLE": "The share of a rank that has its host pool to itself.",
    "kvmover.cache.tiers.Prefetch": "A BestEffort, a Wait, a Timeout or a CostAware.",
    "kvmover.config.keys": "Every setting, by its name.",
}

HEAD = """\
# API

Every public name, by the package that exports it, with the first sentence of what its docstring says; the docstring
says the rest. [Your engine](your-engine.md) shows the ones that an engine needs. `kvmover` itself exports the names of
its first table lazily: importing it loads neither torch nor NIXL. The adapters have pages of their own:
[SGLang](sglang.md), [vLLM](vllm.md). This page is written by `python -m tests.docs.api_page`.
"""


def names(package: str) -> list[str]:
    """What a package promises."""
    module = import_module(package)
    if package in WHOLE:
        return [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == package]
    return list(module.__all__)


def page() -> str:
    return "\n".join([HEAD, *(line for package in (*PACKAGES, *WHOLE) for line in section(package))])


def section(package: str) -> Iterator[str]:
    module = import_module(package)
    yield from (f"## `{package}`", "", sentence(module.__doc__), "", "| name | what it is |", "|---|---|")
    for name in names(package):
        for call, text in rows(package, module, name):
            yield f"| `{call}` | {text} |"
    yield ""


def rows(package: str, module: ModuleType, name: str) -> Iterator[tuple[str, str]]:
    """A row of the name; where this is its home, and not `kvmover` itself, rows of its methods."""
    value = getattr(module, name)
    own = TEXTS.get(f"{package}.{name}")
    yield name + parameters(value), own or sentence(documentation(value))
    if not inspect.isclass(value) or package == "kvmover":
        return
    for attribute, member in vars(value).items():
        text = sentence(documentation(member))
        if not attribute.startswith("_") and text:
            yield f"{name}.{attribute}{parameters(member)}", text


def documentation(member: Any) -> str | None:
    said = inspect.isclass(member) or inspect.isfunction(member)
    return member.__doc__ if said or isinstance(member, (property, classmethod, staticmethod)) else None


def parameters(member: Any) -> str:
    """Names without types: `(request, pages, gates)`. Nothing for a property."""
    function = getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return ""
    shown = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    return f"({', '.join(shown)})"


def sentence(text: str | None) -> str:
    """The first sentence, on one line, safe in a table."""
    first = inspect.cleandoc(text or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
    found = re.match(r".*?\.(?=\s+[A-Z`(]|$)", first)
    return (found[0] if found else first).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
