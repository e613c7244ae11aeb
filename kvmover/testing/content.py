"""Content gives pages whose every byte follows from the page's hash and its logical place, whoever holds it."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvmover.layout import Component
from kvmover.store import PagePart


def page_hash(number: int, salt: str = "") -> bytes:
    """32 bytes that name page `number`; another `salt` names another page."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


@lru_cache(maxsize=512)
def page_content(page: bytes, component: Component, page_tokens: int) -> npt.NDArray[np.uint8]:
    """[head, layer, kv, token, byte of a row] of a whole page."""
    shape = (
        component.heads,
        component.layers,
        component.kv,
        component.extent(page_tokens),
        component.row_bytes,
    )
    seed = hashlib.sha256(page + component.name.encode()).digest()
    content = np.random.default_rng(list(seed)).integers(0, 256, shape, np.uint8)
    content.setflags(write=False)
    return content


def part_content(page: bytes, part: PagePart, page_tokens: int) -> bytes:
    """The bytes of `part` of a page, packed `head layer kv token dim`."""
    whole = page_content(page, part.component, page_tokens)
    box = part.box
    heads = slice(box.heads.start, box.heads.stop)
    layers = slice(box.layers.start, box.layers.stop)
    return whole[heads, layers][:, :, :, list(box.tokens)].tobytes()
