"""docs/api.md, written from the public names and their docstrings. `python -m tests.docs.api_page` updates the page."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"

#: The packages whose `__all__` is promised, in the order of the page, and what belongs to which heading.
PACKAGES = (
    "kvmover",
    "kvmover.layout",
    "kvmover.plan",
    "kvmover.transport",
    "kvmover.transfer",
    "kvmover.migrate",
    "kvmover.store",
    "kvmover.cache.prefix",
    "kvmover.cache.ledger",
    "kvmover.cache.hints",
    "kvmover.cache.tiers",
    "kvmover.cache.page_tiers",
    "kvmover.cache.peers",
    "kvmover.config",
    "kvmover.tools.replay",
    "kvmover.tools.advise",
)

#: Modules without an `__all__`, of which every public class and function is promised.
WHOLE = (
    "kvmover.errors",
    "kvmover.engines.common.directories",
    "kvmover.observe.observers",
    "kvmover.observe.metrics",
    "kvmover.plan.calibration",
    "kvmover.host_copies",
)

#: Whose methods have the docstrings of a protocol's.
IMPLEMENTS = {
    "LoopbackTransport": "Transport",
    "NixlTransport": "Transport",
    "PlainFiles": "Files",
    "NixlFiles": "Files",
    "StoreTier": "PageTier",
    "RemoteTier": "PageTier",
}

#: Names of modules that have others too. The kernels take tensors and integers and know no type of other packages.
CHOSEN = {
    "kvmover.cache.prefix.hashes": ("chain", "chain_bigrams", "as_int64", "as_int64s", "HashError"),
    "kvmover.observe.logs": ("JsonFormatter", "Guest", "configure", "release", "text_formatter", "transfer"),
    "kvmover.observe.runlog": ("RunLog", "LineReader", "read_lines", "Lines", "Run", "Moved", "Accounted"),
    "kvmover.tools.conformance": ("StoreConformance", "Subject", "Identity"),
    "kvmover.tools.tier_conformance": ("PageTierConformance", "TierEngine"),
    "kvmover.kernels.region": ("Planes", "Side", "Region", "RegionError"),
    "kvmover.kernels.reference": ("move",),
    "kvmover.kernels.rows": ("move", "prepare", "standing_program", "general_program"),
    "kvmover.kernels.launch": ("RowConfig", "Program", "Prepared", "Shift"),
    "kvmover.kernels.digest_reference": ("Logical", "digest"),
    "kvmover.kernels.digest": ("digest", "move_and_digest", "prepare", "standing_program", "general_program"),
    "kvmover.kernels.convert_reference": ("Conversion", "decode", "encode", "convert"),
    "kvmover.kernels.convert": ("convert", "prepare", "standing_program"),
    "kvmover.kernels.bulk": (
        "move",
        "prepare",
        "choose",
        "unavailable",
        "CopyEngine",
        "EngineUnavailable",
        "PreparedBulk",
    ),
    "kvmover.kernels.general": ("general",),
    "kvmover.kernels.crossover": ("Crossover", "known", "keep"),
    "kvmover.kernels.copy_times": ("calibrate", "take"),
}

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
    "kvmover.transport.OLDEST_NIXL": "The oldest release of NIXL that is taken: major, minor, patch.",
    "kvmover.transport.NET_DEVICES": "The variable by which UCX chooses network devices.",
    "kvmover.transport.Event": "What `poll` returns: a Note, or that an operation Completed or Failed.",
    "kvmover.store.DIRECT_BYTES": "What O_DIRECT asks of addresses, offsets and lengths on every disk: 4,096.",
    "kvmover.store.HASH_BYTES": "Bytes of a page's hash: 32.",
    "kvmover.cache.prefix.DEFAULT_NAMESPACE": "The namespace of all defaults: no model, adapter or salt is told apart.",
    "kvmover.cache.prefix.NO_IDS": "No page ids: an empty int32 array.",
    "kvmover.cache.prefix.PageArray": "Page ids as the tree gives them: int32, [page], read-only.",
    "kvmover.cache.prefix.PageIds": "Page ids as the tree takes them: a buffer of int32 as it lies, others converted.",
    "kvmover.cache.prefix.Tiers": "A DeviceOnly, a WriteThrough or a WriteBack.",
    "kvmover.cache.prefix.TokenIds": "A row of integers from 0 to 2**32 - 1: a sequence, an array or a buffer.",
    "kvmover.cache.prefix.ALL_PAGES": "The rule of attention KV and of index keys.",
    "kvmover.cache.prefix.LAST_PAGE": "The rule of a state.",
    "kvmover.cache.prefix.FIFO": "Eviction: first in, first out.",
    "kvmover.cache.prefix.HAZARD": "Eviction: least likely to be used again first, as learnt from past uses.",
    "kvmover.cache.prefix.FULL": "The name of the component that every page has: attention KV.",
    "kvmover.cache.prefix.id_runs": "`(ids, most)`: int32 ids as slices of consecutive ids; none if more than `most`.",
    "kvmover.cache.prefix.KVEvent": "A BlockStored, a BlockRemoved or an AllBlocksCleared.",
    "kvmover.cache.prefix.LFU": "Eviction: least often used first.",
    "kvmover.cache.prefix.LRU": "Eviction: least recently used first.",
    "kvmover.cache.prefix.POLICIES": "The eviction policies by name.",
    "kvmover.cache.prefix.PRIORITY": "Eviction: lowest priority first.",
    "kvmover.cache.prefix.ROOT": "The id of the tree's root.",
    "kvmover.cache.prefix.SLRU": "Eviction: what was never hit again goes before what was.",
    "kvmover.cache.ledger.EVERYBODY": "The group of requests that name no tenant and no model.",
    "kvmover.cache.hints.Hint": "A ShareHint, a PrefetchHint, a PinHint, a RetainHint or a DemoteHint.",
    "kvmover.cache.hints.HintAnswer": "A HintMet or a HintRefused.",
    "kvmover.cache.tiers.ALL_PAGES": "A prefix needs every page.",
    "kvmover.cache.tiers.LAST_PAGE": "A prefix needs its last page only: states.",
    "kvmover.cache.tiers.SOLE": "The share of a rank that has its host pool to itself.",
    "kvmover.cache.page_tiers.DROPPED": "The outcome of a page that was not written because too many were waiting.",
    "kvmover.cache.page_tiers.LENT": "The outcome of a page that other engines may read from now on.",
    "kvmover.cache.peers.MOST_LOANS": "Loans of one rank at a time.",
    "kvmover.cache.tiers.Prefetch": "A BestEffort, a Wait, a Timeout or a CostAware.",
    "kvmover.config.settings": "Every setting, by its name.",
}

HEAD = """\
# API

Every public name, by the package that exports it. A row has the signature, and what the docstring says: parameters,
what is returned, what is raised. Of a class of fields the signature is the fields. Below a class are its properties and
methods, and the fields that its docstring says more of than name and type do. Examples are in `help()`.
[Your engine](your-engine.md) shows the names that an engine needs. `kvmover` itself exports the names of its first
table lazily: importing it loads neither torch nor NIXL. The adapters have pages of their own: [SGLang](sglang.md),
[vLLM](vllm.md). This page is written by `python -m tests.docs.api_page`.
"""


def names(package: str) -> list[str]:
    """What a package promises."""
    module = import_module(package)
    if package in CHOSEN:
        return list(CHOSEN[package])
    if package in WHOLE:
        own = (inspect.isclass, inspect.isfunction)
        return [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and any(is_(value) for is_ in own) and value.__module__ == package
        ]
    return list(module.__all__)


def page() -> str:
    packages = (*PACKAGES, *WHOLE, *CHOSEN)
    return "\n".join([HEAD, *(line for package in packages for line in section(package))])


def section(package: str) -> Iterator[str]:
    module = import_module(package)
    yield from (f"## `{package}`", "", sentence(module.__doc__), "", "| name | what it is |", "|---|---|")
    for name in names(package):
        for call, text in rows(package, module, name):
            yield f"| `{safe(call)}` | {safe(text)} |"
    yield ""


def rows(package: str, module: ModuleType, name: str) -> Iterator[tuple[str, str]]:
    """A row of the name; where this is its home, and not `kvmover` itself, rows of its fields and methods."""
    value = getattr(module, name)
    value = getattr(value, "__wrapped__", value)  # of a function whose answers are kept
    own = TEXTS.get(f"{package}.{name}")
    if package == "kvmover":
        yield name, own or sentence(documentation(value))
        return
    held = list(fields(value)) if inspect.isclass(value) else []
    made = f"({', '.join(field for field, _ in held)})" if held else signature(value)
    yield name + made, own or whole(value, [field.partition(":")[0] for field, _ in held])
    if not inspect.isclass(value):
        return
    yield from ((f"{name}.{field}", text) for field, text in held if text)
    for attribute, member in vars(value).items():
        if not attribute.startswith("_") and is_call(member):
            text = prose(documentation(member))
            if not text and name in IMPLEMENTS:
                text = f"As {IMPLEMENTS[name]}.{attribute}."
            if not text and attribute.startswith("test_"):
                text = attribute.removeprefix("test_").replace("_", " ").capitalize() + "."
            yield f"{name}.{attribute}{signature(member)}", text


def is_call(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, (property, cached_property, classmethod, staticmethod))


def fields(kind: type) -> Iterator[tuple[str, str]]:
    """`held: bool = False`, with the sentences of the class's docstring that are about `held`, if there are any."""
    said = inspect.cleandoc(kind.__doc__ or "")
    if is_dataclass(kind):
        found = [
            (field.name, words(field.type), None if field.default is MISSING else repr(field.default))
            for field in dataclasses.fields(kind)
        ]
    elif issubclass(kind, msgspec.Struct):
        found = [
            (
                field.name,
                words(next(each.__annotations__[field.name] for each in kind.__mro__ if field.name in _own(each))),
                None if field.required else repr(field.default),
            )
            for field in msgspec.structs.fields(kind)
        ]
    else:
        return
    for field, type_, default in found:
        if not field.startswith("_"):
            yield f"{field}: {type_}" + (f" = {_short(default)}" if default else ""), about(field, said)


def _own(kind: type) -> dict[str, Any]:
    return vars(kind).get("__annotations__", {})


def _short(default: str) -> str:
    """`<Verb.PUSH: 'push'>` as `'push'`; a value of many fields as `...`."""
    member = re.fullmatch(r"<\w+\.\w+: (.*)>", default)
    return member[1] if member else default if len(default) < 30 and default[0] != "<" else "..."


def about(field: str, said: str) -> str:
    """What a docstring says after "`field`:", up to the next such name."""
    texts = _sentences(said.split(">>>")[0])
    for at, text in enumerate(texts):
        if text.startswith(f"`{field}`: "):
            own = [text.partition(": ")[2], *itertools.takewhile(lambda other: other[0] != "`", texts[at + 1 :])]
            return " ".join(own)
    return ""


def documentation(member: Any) -> str | None:
    said = inspect.isclass(member) or inspect.isfunction(member)
    wrapped = isinstance(member, (property, cached_property, classmethod, staticmethod))
    return member.__doc__ if said or wrapped else None


def whole(value: Any, held: Sequence[str]) -> str:
    """What a function's docstring says, or a class's without what it says of the fields `held`; members of an enum."""
    text = prose(documentation(value), held)
    if inspect.isclass(value) and issubclass(value, Enum):
        return f"{text} One of {', '.join(f'`{member.value}`' for member in value)}."
    if inspect.isclass(value) and (made := vars(value).get("__init__")) is not None and not is_dataclass(value):
        return " ".join(filter(None, (text, prose(made.__doc__))))
    return text


def prose(text: str | None, held: Sequence[str] = ()) -> str:
    """A docstring on one line, without its examples, and without what rows of their own say of fields."""
    cut, shown = False, list[str]()
    for said in _sentences(inspect.cleandoc(text or "").split(">>>")[0]):
        of = re.match(r"`(\w+)`: ", said)
        cut = bool(of and of[1] in held) or (cut and not said.startswith("`"))
        shown += [] if cut else [said]
    if shown and shown[-1].endswith(":"):  # the example's own introduction
        shown.pop()
    return " ".join(shown)


def _sentences(text: str) -> list[str]:
    flat = " ".join(text.replace("``", "`").split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", flat)


def signature(member: Any) -> str:
    """`(request: str, pages: Sequence[ArrayLike]) -> Transfer`. Of a property, its type."""
    if isinstance(member, (property, cached_property)):
        function = member.fget if isinstance(member, property) else member.func
        return f": {words(inspect.signature(function).return_annotation)}"
    if inspect.isclass(member):
        made = vars(member).get("__init__")
        plain = is_dataclass(member) or issubclass(member, (msgspec.Struct, Enum, BaseException)) or made is None
        return "" if plain else parameters(made)
    function = getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return ""
    back = inspect.signature(function).return_annotation
    return parameters(function) + ("" if back is inspect.Signature.empty else f" -> {words(back)}")


def parameters(function: Any) -> str:
    shown: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {words(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_short(repr(parameter.default))}"
        shown.append(text)
    return f"({', '.join(shown)})"


def words(annotation: Any) -> str:
    """A type as it is written, without the modules before its names."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text.strip("\"'"))


def safe(text: str) -> str:
    """In a cell of a table."""
    return re.sub(r"(?<!\\)\|", "\\\\|", text)


def sentence(text: str | None) -> str:
    """The first sentence, on one line."""
    first = inspect.cleandoc(text or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
    found = re.match(r".*?\.(?=\s+[A-Z`(]|$)", first)
    return found[0] if found else first


if __name__ == "__main__":
    PAGE.write_text(page())
