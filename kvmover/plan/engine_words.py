"""Fleets may be given in an engine's own words, as it is started: `vllm --tensor-parallel-size 8 --block-size 16`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from kvmover.errors import LayoutError

#: Options that shape a fleet, by the key of `tp=4,pp=1,page=64`, as each engine has them.
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "--tensor-parallel-size": "tp",
        "-tp": "tp",
        "--pipeline-parallel-size": "pp",
        "-pp": "pp",
        "--block-size": "page",
    },
    "sglang": {
        "--tensor-parallel-size": "tp",
        "--tp-size": "tp",
        "--tp": "tp",
        "--pipeline-parallel-size": "pp",
        "--pp-size": "pp",
        "--pp": "pp",
        "--page-size": "page",
    },
}

#: Tokens of a page where the option is left out.
_PAGES = {"vllm": 16, "sglang": 1}


def in_our_words(text: str) -> str:
    """`vllm -tp 8` as `tp=8,page=16`; any other text as it is. Raises LayoutError for an option that is not known.

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
