"""The content of a prompt, in the one form in which engines of any make compute equal digests.

The digest covers everything but the weights that KV depends on: the bytes of adapter, images, embeddings and other
inputs, the salt, and the token ids as int32. An engine's names for those inputs have no part in it.
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
    """An image, a sound or embeddings in place of `tokens` token ids from position `offset` on, with a digest of its
    bytes.
    """

    offset: int
    tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The parts of a prompt beside its token ids. `adapter` is the digest of its weights. `unknown` names a part that
    has no digest, with the reason; it is empty if all have one.
    """

    adapter: bytes = b""
    salt: str = ""
    inputs: tuple[PromptInput, ...] = ()
    unknown: str = ""

    def before(self, tokens: int) -> PromptParts:
        """Returns the parts of a prompt's first `tokens` tokens."""
        return replace(self, inputs=tuple(each for each in self.inputs if each.offset < tokens))


TOKENS_ALONE = PromptParts()


class PromptHasher:
    """The running digest of a growing prompt: each new token costs that token only."""

    def __init__(self, parts: PromptParts = TOKENS_ALONE) -> None:
        self._unknown = parts.unknown
        inputs = [(each.offset, each.tokens, each.digest) for each in parts.inputs]
        self._hash = sha256(msgspec.msgpack.encode([_FORM, parts.adapter, parts.salt, inputs]))
        self._tokens = 0

    def content(self, token_ids: Sequence[int], tokens: int) -> Content:
        """Returns the content of the first `tokens` of `token_ids`, at least as many as at the last call.

        8,192 tokens take some 30 us as a list, most of it SHA-256.
        """
        try:
            key = RadixKey.of(token_ids[self._tokens : tokens], DEFAULT_NAMESPACE, KeyUnits.PLAIN)
            self._hash.update(key.data)
        except PrefixError as error:  # engines mark positions without a token by a negative number
            self._unknown = self._unknown or str(error)
        self._tokens = tokens
        return Content(tokens, b"" if self._unknown else self._hash.digest()[:DIGEST_BYTES], self._unknown)


def content_of(token_ids: Sequence[int], parts: PromptParts = TOKENS_ALONE) -> Content:
    """Returns the content of a whole prompt."""
    return PromptHasher(parts).content(token_ids, len(token_ids))


def adapter_parts(folder: str, parts: PromptParts) -> PromptParts:
    """Returns `parts` with the LoRA adapter in `folder`; `unknown` is set if its files cannot be read."""
    try:
        return replace(parts, adapter=bytes.fromhex(digest_of_adapter(Path(folder))))
    except (UnknownWeights, OSError) as error:
        return replace(parts, unknown=f"adapter in {folder}: {error}")


def digest_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Returns the digest of a model input: names, dtypes, shapes and bytes of its tensors, sorted by name.

    4 MiB of pixels take some 3 ms.
    """
    import torch

    found = sha256()
    for name, tensor in sorted(named, key=lambda each: each[0]):
        found.update(msgspec.msgpack.encode([name, str(tensor.dtype), tuple(tensor.shape)]))
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        found.update(memoryview(flat.view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return found.digest()
