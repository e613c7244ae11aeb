"""RadixKeys make the tree's keys from SGLang's tokens, extra keys, salts and adapters."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from kvmover.cache.prefix import DEFAULT_NAMESPACE, PrefixError, PrefixNamespace, PrefixTree, RadixKey
from kvmover.engines.sglang.sglang_contract import lora_name


class RadixKeys:
    """The keys of one tree. `lora_names`: SGLang's, by extra key."""

    def __init__(self, tree: PrefixTree, lora_names: Any) -> None:
        self._units, self._lora_names = tree.config.units, lora_names

    def of(self, key: Any) -> RadixKey:
        """Returns the key of SGLang's RadixKey."""
        return self.of_tokens(key.token_ids, key.extra_key, key.cache_salt, key.limit)

    def of_request(self, req: Any, tokens: Any, limit: int | None = None) -> RadixKey:
        """Returns the key of tokens in a request's namespace."""
        return self.of_tokens(tokens, req.extra_key, req.cache_salt, limit)

    def of_tokens(
        self, tokens: Any, extra_key: str | None, cache_salt: str | None, limit: int | None = None
    ) -> RadixKey:
        """Returns the key of the first `limit` tokens; empty, so that it is not cached, if a token exceeds 32 bits."""
        namespace = DEFAULT_NAMESPACE
        if cache_salt or extra_key is not None:
            namespace = _namespace(extra_key, cache_salt, lora_name(self._lora_names, extra_key))
        if limit is not None and limit < len(tokens):
            tokens = cast("list[int]", tokens)[:limit] if isinstance(tokens, list) else memoryview(tokens)[:limit]
        try:
            return RadixKey.of(tokens, namespace, self._units)
        except PrefixError:
            return RadixKey.of((), namespace, self._units)


@lru_cache(maxsize=4096)
def _namespace(extra_key: str | None, cache_salt: str | None, lora_name: str) -> PrefixNamespace:
    """Returns the namespace. An empty salt is no salt, but an empty extra key is one. Events name the LoRA."""
    return PrefixNamespace(adapter=lora_name, salt=cache_salt or "", extra=() if extra_key is None else (extra_key,))
