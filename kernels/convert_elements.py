"""Kernel functions convert stored elements to float32 and back, rounded as `convert_reference` defines.

From sm_90 on the hardware converts to e4m3. sm_80 cannot, and on sm_89 Triton 3.6 goes through fp16 and rounds twice:
there, and in Triton's interpreter, integer arithmetic gives the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Kernel numbers of elements and of block scales, by torch's names; 0 for a block without.
ELEMENTS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float4_e2m1fn_x2": 4, "float8_e5m2": 5}
SCALES = {"float32": 0, "": 0, "float8_e4m3fn": 3, "float8_e8m0fnu": 6}
F32, F16, BF16, E4M3, E2M1, E5M2, E8M0 = (tl.constexpr(number) for number in range(7))


@triton.jit
def as_float(q, KIND: tl.constexpr, CASTS: tl.constexpr):
    """Return stored elements as float32, exactly. `q`: words of their width, e2m1 one a byte."""
    if KIND == F32:
        x = q
    elif KIND == F16:
        x = q.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == BF16:
        x = (q.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == E4M3:
        if CASTS:
            x = q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            wide = q.to(tl.int32)
            # Shifted 20 bits, into float32's exponent and mantissa, they are the number times 2**-120, subnormal or
            # not.
            magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            x = (magnitude.to(tl.int32, bitcast=True) | (wide & 0x80) << 24).to(tl.float32, bitcast=True)
            x = tl.where((wide & 0x7F) == 0x7F, float("nan"), x)
    elif KIND == E5M2:  # the upper half of a float16
        x = (q.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == E8M0:  # float32's exponent; 2**-127 is subnormal there
        wide = q.to(tl.int32) & 0xFF
        x = tl.where(wide == 0, 0x400000, wide << 23).to(tl.float32, bitcast=True)
        x = tl.where(wide == 0xFF, float("nan"), x)
    else:
        wide = q.to(tl.int32)
        magnitude = ((wide & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
        x = (magnitude.to(tl.int32, bitcast=True) | (wide & 8) << 28).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _to_byte(y, DIGITS: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, STEP: tl.constexpr):
    """Round float32 to a sign, an exponent and `DIGITS` bits, as int8: to nearest even, NaN to 0x7F.

    The least normal number is 2**`LEAST`; float32 has the largest as the bits `LARGEST`, beyond which all become it.
    Near `STEP` float32's step is that of the subnormal numbers: an addition rounds to it.
    """
    SHIFT: tl.constexpr = 23 - DIGITS
    bits = y.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    normal = ((magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT) - ((126 + LEAST) << DIGITS)  # pyright: ignore
    stepped = magnitude.to(tl.float32, bitcast=True) + STEP
    subnormal = stepped.to(tl.int32, bitcast=True) - ((150 + LEAST - DIGITS) << 23)
    q = tl.where(magnitude < ((127 + LEAST) << 23), subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(y == y, q, 0x7F).to(tl.int8)


@triton.jit
def to_fp8(y, CASTS: tl.constexpr):
    """Round float32 to e4m3 as int8: to nearest even, beyond 448 to 448, NaN to 0x7F, as `cvt.rn.satfinite` does."""
    if CASTS:
        return y.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    return _to_byte(y, 3, -6, 0x43E00000, 16384.0)


@triton.jit
def to_e5m2(y):
    """Round float32 to e5m2 as int8: to nearest even, beyond 57,344 to 57,344, NaN to 0x7F."""
    return _to_byte(y, 2, -14, 0x47600000, 128.0)


@triton.jit
def to_power(y):
    """Return the least power of two that is at least `y`, as e8m0 in int8. `y`: normal, and at most 2**127."""
    bits = y.to(tl.int32, bitcast=True)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)).to(tl.int8)


@triton.jit
def to_fp4(y):
    """Round float32 to e2m1 in the low half of int8: to nearest even, beyond 6 to 6. `y` must not be NaN."""
    m = tl.abs(y)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return (code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)).to(tl.int8)


@triton.jit
def in_words(q, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Return `COUNT` stored elements a row, of 8, 16 or 32 bits, as 32-bit words, little endian, the last one filled
    with zero bytes: [row, word].
    """
    BITS: tl.constexpr = q.dtype.primitive_bitwidth
    if BITS == 32:
        words = q.to(tl.int32, bitcast=True)
    else:
        TOGETHER: tl.constexpr = min(32 // BITS, COUNT)
        each = tl.reshape(q.to(tl.int32) & ((1 << BITS) - 1), [ROWS, COUNT // TOGETHER, TOGETHER])  # pyright: ignore
        words = tl.sum(each << (tl.arange(0, TOGETHER) * BITS)[None, None, :], 2)
    return words


@triton.jit
def to_words(x, KIND: tl.constexpr, CASTS: tl.constexpr):
    """Round float32 to a plain element, to nearest even, as stored: float32 or int16. NaN is as hardware writes it."""
    if KIND == F32:
        words = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FFFFFFF).to(tl.float32, bitcast=True)
    elif KIND == F16:
        words = tl.where(x == x, x.to(tl.float16).to(tl.int16, bitcast=True), 0x7FFF).to(tl.int16)
    elif CASTS:
        words = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        words = tl.where(x == x, words, 0x7FFF).to(tl.int16)
    return words
