"""Fleets are parsed from text, `tp=4,page=16,order=NHD`, or from an engine's options: `vllm -tp 8 --block-size 16`.

Components are too: `name=c4,layers=30,dim=584,dtype=uint8,row_tokens=4`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from math import lcm

from kvmover.errors import LayoutError
from kvmover.layout.codec import FORMS, named
from kvmover.layout.component import Component
from kvmover.layout.fleet import CpOrder, Fleet
from kvmover.layout.layout import axes_of

#: Larger sizes overflow where they are multiplied, and lie beyond any real fleet.
_MOST = 1 << 31

_SIZES = {"tp": "tp", "pp": "pp", "cp": "cp", "page": "page_tokens"}

#: `page.c4=64`: rows of a page of one component.
_OWN_PAGE = "page."


@dataclass(frozen=True, slots=True)
class FleetText:
    """A fleet, the axis order of its pools and the form of their rows (see `codec.named`), from a command line."""

    fleet: Fleet
    order: str
    form: str = "auto"

    @classmethod
    def parse(cls, text: str, page_tokens: int = 64) -> FleetText:
        """Parse `tp=4,pp=2,cp=2,cp_order=page,page=16,order=NHD`; defaults are 1, page, `page_tokens` and NHD.

        `page.c4=64` is the rows of a page of component c4, `dtype=fp8_e4m3` the form of the cache.

        Raises LayoutError naming the first wrong word.
        """
        sizes: dict[str, int] = {}
        pages: dict[str, int] = {}
        order, cp_order, form = "NHD", CpOrder.PAGE, "auto"
        seen: set[str] = set()
        for word in text.split(","):
            key, _, value = word.strip().partition("=")
            if key in seen:
                raise LayoutError(f"{key} is given twice in {text!r}")
            seen.add(key)
            if key == "order":
                axes_of(value)
                order = value
            elif key == "dtype":
                if value not in FORMS:
                    raise LayoutError(f"unknown dtype {value!r} in {text!r}; known are {', '.join(FORMS)}")
                form = value
            elif key == "cp_order":
                if value not in set(CpOrder):
                    raise LayoutError(f"unknown cp_order {value!r} in {text!r}; known are {', '.join(CpOrder)}")
                cp_order = CpOrder(value)
            elif key in _SIZES:
                sizes[_SIZES[key]] = _size(key, value, text)
            elif key.startswith(_OWN_PAGE) and key != _OWN_PAGE:
                pages[key.removeprefix(_OWN_PAGE)] = _size(key, value, text)
            else:
                known = ", ".join((*_SIZES, "page.COMPONENT", "order", "cp_order", "dtype"))
                raise LayoutError(f"unknown word {word!r} in {text!r}; known are {known}")
        return cls(
            Fleet(**{"page_tokens": page_tokens, **sizes}, cp_order=cp_order, pages=tuple(pages.items())), order, form
        )

    def stored(self, component: Component) -> Component:
        """Returns a component in this fleet's form; opaque bytes as they are. Raises LayoutError if unfit."""
        if component.form is None or self.form == "auto":
            return component
        return component.kept_as(named(self.form, component.dtype, [component.dim]))


def _size(key: str, value: str, text: str) -> int:
    try:
        size = int(value)
    except ValueError:
        raise LayoutError(f"{key} = {value!r} in {text!r} is not a number") from None
    if size > _MOST:
        raise LayoutError(f"{key} = {value} in {text!r} is more than {_MOST}, the most that there may be")
    return size


def usual_page(components: Iterable[Component]) -> int:
    """Returns the tokens of a page where none are given: 64, or the least multiple of it that ends no row early.

    >>> usual_page([Component("c128", 20, 1, 1, 584, "uint8", row_tokens=128)])
    128
    """
    return lcm(64, *(each.row_tokens for each in components))


def component_of(text: str) -> Component:
    """Parse a component from its fields; `kv` and `heads` default to 1. Raises LayoutError naming the wrong field.

    >>> component_of("name=c4,layers=30,dim=584,dtype=uint8,row_tokens=4").extent(1003)
    250
    """
    known = {each.name: each.default for each in fields(Component) if each.name != "codec"}
    found: dict[str, str | int] = {"kv": 1, "heads": 1}
    seen: set[str] = set()
    for word in text.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in known:
            raise LayoutError(f"unknown word {word.strip()!r} in {text!r}; known are {', '.join(known)}")
        if key in seen:
            raise LayoutError(f"{key} is given twice in {text!r}")
        seen.add(key)
        found[key] = value if key in ("name", "dtype") else _size(key, value, text)
    if missing := [key for key, default in known.items() if default is MISSING and key not in found]:
        raise LayoutError(f"{text!r} gives no {missing[0]}")
    return Component(**found)  # pyright: ignore[reportArgumentType]


#: Each engine's options that shape a fleet, by their key in `tp=4,pp=1,page=64`.
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "--tensor-parallel-size": "tp",
        "-tp": "tp",
        "--kv-cache-dtype": "dtype",
        "--pipeline-parallel-size": "pp",
        "-pp": "pp",
        "--block-size": "page",
    },
    "sglang": {
        "--tensor-parallel-size": "tp",
        "--tp-size": "tp",
        "--tp": "tp",
        "--kv-cache-dtype": "dtype",
        "--pipeline-parallel-size": "pp",
        "--pp-size": "pp",
        "--pp": "pp",
        "--page-size": "page",
    },
}

#: Tokens of a page by default.
_PAGES = {"vllm": 16, "sglang": 1}


def in_our_words(text: str) -> str:
    """Returns `vllm -tp 8` as `tp=8,page=16`; any other text unchanged. Raises LayoutError for an unknown option.

    >>> in_our_words("vllm: --tensor-parallel-size 8"), in_our_words("sglang --tp=4 --page-size 64")
    ('page=16,tp=8', 'page=64,tp=4')
    """
    engine, _, rest = text.strip().partition(" ")
    engine = engine.removesuffix(":")
    if engine not in _OPTIONS:
        return text
    found = {"page": str(_PAGES[engine])}
    try:
        words = shlex.split(rest.replace("=", " "))
    except ValueError as error:
        raise LayoutError(f"{error} in {text!r}") from None
    while words:
        option = words.pop(0)
        if option not in _OPTIONS[engine]:
            raise LayoutError(f"unknown option {option!r} of {engine}; known are {', '.join(_OPTIONS[engine])}")
        if not words:
            raise LayoutError(f"{option} in {text!r} has no value")
        found[_OPTIONS[engine][option]] = words.pop(0)
    return ",".join(f"{key}={value}" for key, value in found.items())
