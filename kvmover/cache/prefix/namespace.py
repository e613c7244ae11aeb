"""Namespace: what else must be equal, beside the tokens, for two prompts to share KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

_TAG = b"kvmover-namespace-v1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Model, adapter, tenant salt and further keys (an image's digest, a session): what shares KV is equal in all.

    Fields are compared and hashed one by one, never joined: an adapter "ab" with salt "c" is not "a" with "bc". Engines
    that append the adapter to another key cannot tell those apart (SGLang 0.5.23, `schedule_batch.py`).
    """

    model: str = ""
    adapter: str = ""
    salt: str = field(default="", repr=False)
    extra: tuple[str, ...] = ()

    @property
    def digest(self) -> bytes:
        """32 bytes that page hashes start from; empty for the namespace of all defaults.

        So hashes of requests without model, adapter and salt equal SGLang's, which start from nothing too.
        """
        return _digest(self)


@lru_cache(maxsize=4096)
def _digest(namespace: Namespace) -> bytes:
    if namespace == Namespace():
        return b""
    fields = (namespace.model, namespace.adapter, namespace.salt, *namespace.extra)
    whole = sha256(_TAG)
    for text in fields:
        encoded = text.encode("utf-8", "surrogatepass")
        whole.update(len(encoded).to_bytes(8, "little") + encoded)
    return whole.digest()
