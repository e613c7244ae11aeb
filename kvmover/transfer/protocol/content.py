"""A Content identifies the prompt that a request's KV is of, so that sides with different prompts find out before bytes
move.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from kvmover.errors import PlanError

#: Bytes of a digest: the first half of a SHA-256.
DIGEST_BYTES = 16

#: Characters of the reason why a prompt has no digest.
MAX_UNKNOWN_CHARACTERS = 200


class IdentityCheck(StrEnum):
    """A source's policy if one side has no digest of the prompt: CHECKED refuses the request, TRUST serves it. Both
    refuse digests that differ.
    """

    CHECKED = "checked"
    TRUST = "trust"


class Content(msgspec.Struct, frozen=True, array_like=True):
    """A prompt by its length in tokens and a digest over everything that its KV depends on, equal on both sides.

    `digest`: 16 bytes over token ids, adapter, images and salt. It is empty if one of these has no id by content;
    `unknown` then says which. Raises PlanError for a longer digest.

    >>> print(Content(300, bytes(range(16))))
    300 tokens 000102030405060708090a0b0c0d0e0f
    """

    tokens: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    digest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""
    unknown: Annotated[str, msgspec.Meta(max_length=MAX_UNKNOWN_CHARACTERS)] = ""

    def __post_init__(self) -> None:
        if len(self.digest) > DIGEST_BYTES:
            raise PlanError(f"content has a digest of {len(self.digest)} bytes; it has at most {DIGEST_BYTES}")
        if len(self.unknown) > MAX_UNKNOWN_CHARACTERS:
            msgspec.structs.force_setattr(self, "unknown", self.unknown[:MAX_UNKNOWN_CHARACTERS])

    def __str__(self) -> str:
        return f"{self.tokens} tokens {self.digest.hex() or f'without a digest ({self.unknown})'}"


def disagreement(held: Content | None, wanted: Content | None, identity: IdentityCheck) -> str | None:
    """Returns why KV of the prompt `held` can't serve a request for `wanted`; None if it can.

    Two sides without a prompt (None) agree: their callers know the request. One None beside a named prompt counts as an
    unknown prompt.

    >>> disagreement(Content(300, unknown="an image"), Content(300, b"b" * 16), IdentityCheck.TRUST)
    >>> disagreement(None, None, IdentityCheck.CHECKED)
    """
    if held is None and wanted is None:
        return None
    if held is not None and wanted is not None and held.digest and wanted.digest:
        if (held.tokens, held.digest) == (wanted.tokens, wanted.digest):
            return None
        return f"the KV is of {held}, and {wanted} were asked for"
    if identity is IdentityCheck.TRUST:
        return None
    said, asked = (str(each) if each is not None else "a prompt that nobody named" for each in (held, wanted))
    return f'the KV is of {said}, and {asked} were asked for: only identity = "trust" takes what is not known'
