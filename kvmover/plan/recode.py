"""Recoding: where two pools store the same numbers in different forms, the narrower form travels and the other side
converts.

Both sides derive this from both pools; it is never sent. Equal forms with equal scales give None here: bytes travel
unchanged, by any route.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from kvmover.layout.codec import error_of
from kvmover.layout.component import Component
from kvmover.layout.pool import PoolSpec
from kvmover.layout.span import Span
from kvmover.plan.lower import Held, Recode, Scales


class Forms(msgspec.Struct, frozen=True, eq=False):
    """A leg whose ends differ in form: the component on the `wire`; `gathers`: the source converts."""

    wire: Component
    gathers: bool

    @property
    def scatters(self) -> bool:
        """True if the destination converts."""
        return not self.gathers


def forms_of(src: Held, dst: Held, layers: Span) -> Forms | None:
    """Returns the conversion of `layers` between two ranks; None where they are stored alike, or a form is opaque."""
    one, other = src.spec, dst.spec
    if one.component is other.component and not one.scales and not other.scales:
        return None
    return _forms(one, other, src.shard.layers, dst.shard.layers, layers)


@lru_cache(maxsize=1024)
def _forms(src: PoolSpec, dst: PoolSpec, src_layers: Span, dst_layers: Span, layers: Span) -> Forms | None:
    """Cached: pools are immutable. Of two forms of equal width the destination's travels."""
    held, kept = src.component.form, dst.component.form
    if held is None or kept is None:
        return None
    if held == kept and np.array_equal(scales_of(src, src_layers, layers), scales_of(dst, dst_layers, layers)):
        return None
    gathers = kept.row_bytes <= held.row_bytes
    return Forms(dst.component if gathers else src.component, gathers)


def form_text(component: Component) -> str:
    """Describe a component's form: `512 float8_e4m3fn by 128 + 64 bfloat16`."""
    return component.form.text() if component.form else f"{component.dim} {component.dtype}"


def scales_of(spec: PoolSpec, held: Span, layers: Span) -> Scales:
    """Returns scales [plane, part] of `layers` of a rank that holds the layers `held`: 1 where its pool has none."""
    kv, each = spec.component.kv, spec.component.codec.scales if spec.component.codec else 0
    if not spec.scales:
        return np.ones((layers.count * kv, each), np.float32)
    every = np.array(spec.scales, np.float32).reshape(-1, kv * each)
    return every[[held.index(layer) for layer in layers]].reshape(-1, each)


def recode_of(src: Held, dst: Held, layers: Span) -> Recode:
    """Returns the conversion from one end's form to the other's, for planes of `layers`. Both must have a form."""
    return _recode(src.spec, dst.spec, src.shard.layers, dst.shard.layers, layers)


@lru_cache(maxsize=1024)
def _recode(src: PoolSpec, dst: PoolSpec, src_layers: Span, dst_layers: Span, layers: Span) -> Recode:
    held, kept = src.component.form, dst.component.form
    assert held is not None, "opaque bytes are not converted"
    assert kept is not None, "opaque bytes are not converted"
    return Recode(held, kept, scales_of(src, src_layers, layers), scales_of(dst, dst_layers, layers))


def error_between(one: PoolSpec, other: PoolSpec, own: Span, theirs: Span) -> float:
    """Returns the largest error of a number, relative to the largest that shares its scale, when it goes from one pool
    to the other in either direction: see `layout.codec.CodecPart.error`. 0: bit for bit the same.

    `own`, `theirs`: the layers that each rank holds.
    """
    held, kept = one.component.form, other.component.form
    if held is None or kept is None:
        return 0.0
    found = max(error_of(held, kept), error_of(kept, held))
    if layers := own & theirs:
        before, after = scales_of(one, own, layers), scales_of(other, theirs, layers)
        if held == kept and not np.array_equal(before, after):
            found = max(found, *(part.error for part in kept.parts if part.is_scaled))
    return found
