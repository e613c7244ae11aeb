"""Engines of different make exchange KV in one vocabulary of components, and under a name that the operator gives."""

from __future__ import annotations

from kvmover.layout import Component

#: Dtypes whose rows mean the same in every engine. A quantised row goes with scales that each engine keeps elsewhere.
EXCHANGED_DTYPES = ("bfloat16", "float16", "float32")


def exchanged(cache: Component, kv: int) -> Component | None:
    """`cache` as every engine describes it: rows of `kv` = 2, keys and values of a head, or 1, a latent.

    None where engines have no common word for it: windows, states, compressed and quantised rows, drafts.

    >>> own = Component("full_attention 0, 64 bfloat16", layers=4, kv=1, heads=8, dim=256, dtype="bfloat16")
    >>> exchanged(own, kv=2)
    Component(name='attention', layers=4, kv=2, heads=8, dim=128, dtype='bfloat16', window=None, states=0, row_tokens=1)
    """
    row, rest = divmod(cache.kv * cache.dim, kv)
    plain = cache.window is None and not cache.states and cache.row_tokens == 1
    if rest or not plain or cache.dtype not in EXCHANGED_DTYPES or (kv == 1 and cache.heads > 1):
        return None
    if kv == 1:
        return Component.mla(cache.layers, row, cache.dtype)
    return Component.attention(cache.layers, cache.heads, row, cache.dtype)
