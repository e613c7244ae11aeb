"""The content of a prompt is built here, in the one form in which two engines of any make get equal digests.

The digest covers everything besides weights that KV depends on: the adapter by its bytes, images, embeddings and other
inputs by theirs, the salt, and the token ids as int32. Names that an engine gives to those are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvmover.cache.prefix import DEFAULT_NAMESPACE, KeyUnits, PrefixError, RadixKey
from kvmover.engines.common.checkpoint import UnknownWeights, digest_of_adapter
from kvmover.transfer.protocol.content import DIGEST_BYTES, Content

if TYPE_CHECKING:
    import torch

_FORM = "kvmover prompt"


@dataclass(frozen=True, slots=True)
class PromptInput:
    """An image, a sound or embeddings in place of `tokens` token ids from position `offset` on. `digest`: of its
    bytes."""

    offset: int
    tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The parts of a prompt beside its token ids. `adapter`: the digest of its weights. `unknown`: the part that has no
    id by content, with the reason; empty where all have."""

    adapter: bytes = b""
    salt: str = ""
    inputs: tuple[PromptInput, ...] = ()
    unknown: str = ""

    def before(self, tokens: int) -> PromptParts:
        """Returns the parts of a prompt's first `tokens` tokens."""
        return replace(self, inputs=tuple(each for each in self.inputs if each.offset < tokens))


TOKENS_ALONE = PromptParts()


class PromptHasher:
    """The content of a prompt, and of what it grows to: a token more costs that token."""

    def __init__(self, parts: PromptParts = TOKENS_ALONE) -> None:
        self._unknown = parts.unknown
        inputs = [(each.offset, each.tokens, each.digest) for each in parts.inputs]
        self._hash = sha256(msgspec.msgpack.encode([_FORM, parts.adapter, parts.salt, inputs]))
        self._tokens = 0

    def content(self, token_ids: Sequence[int], tokens: int) -> Content:
        """Returns the content of the first `tokens` of `token_ids`, no fewer than at the last call.

        8,192 tokens take some 30 us as a list, most of it SHA-256.
        """
        try:
            key = RadixKey.of(token_ids[self._tokens : tokens], DEFAULT_NAMESPACE, KeyUnits.PLAIN)
            self._hash.update(key.data)
        except PrefixError as error:  # an engine marks what is no token by a negative number
            self._unknown = self._unknown or str(error)
        self._tokens = tokens
        return Content(tokens, b"" if self._unknown else self._hash.digest()[:DIGEST_BYTES], self._unknown)


def content_of(token_ids: Sequence[int], parts: PromptParts = TOKENS_ALONE) -> Content:
    """Returns the content of a whole prompt."""
    return PromptHasher(parts).content(token_ids, len(token_ids))


def adapter_parts(folder: str, parts: PromptParts) -> PromptParts:
    """Returns `parts` with the LoRA adapter in `folder`; unknown where its files cannot be read."""
    try:
        return replace(parts, adapter=bytes.fromhex(digest_of_adapter(Path(folder))))
    except (UnknownWeights, OSError) as error:
        return replace(parts, unknown=f"adapter in {folder}: {error}")


def digest_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Returns the digest of an input that a model reads: names, dtypes, shapes and bytes of its tensors, in order of
    their names. 4 MiB of pixels take some 3 ms."""
    import torch

    found = sha256()
    for name, tensor in sorted(named, key=lambda each: each[0]):
        found.update(msgspec.msgpack.encode([name, str(tensor.dtype), tuple(tensor.shape)]))
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        found.update(memoryview(flat.view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return found.digest()
