"""The components in which engines of different make exchange KV, under a weights name that the operator gives."""

from __future__ import annotations

from kvmover.layout import Component

#: Dtypes whose rows are equal in every engine. A quantised row has scales, which each engine keeps elsewhere.
EXCHANGED_DTYPES = ("bfloat16", "float16", "float32")


def exchanged(cache: Component, kv: int) -> Component | None:
    """Returns `cache` in the form common to all engines: rows of `kv` = 2, keys and values of a head, or 1, a latent.

    Returns None if there is no common form: windows, states, compressed or quantised rows, drafts.

    >>> own = Component("full_attention 0, 64 bfloat16", layers=4, kv=1, heads=8, dim=256, dtype="bfloat16")
    >>> exchanged(own, kv=2) == Component.attention(layers=4, kv_heads=8, head_dim=128, dtype="bfloat16")
    True
    """
    row, rest = divmod(cache.kv * cache.dim, kv)
    plain = cache.window is None and not cache.states and cache.row_tokens == 1
    if rest or not plain or cache.dtype not in EXCHANGED_DTYPES or (kv == 1 and cache.heads > 1):
        return None
    if kv == 1:
        return Component.mla(cache.layers, row, cache.dtype)
    return Component.attention(cache.layers, cache.heads, row, cache.dtype)
