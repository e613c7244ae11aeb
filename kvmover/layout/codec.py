"""A Codec is the storage form of rows of numbers: their elements and scales. A value; it touches no bytes.

Pools that store the same numbers by different codecs hold the same component. Rows are converted on the way;
`kernels/convert_reference.py` defines every bit of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from kvmover.errors import LayoutError
from kvmover.fields import settle_whole

#: Bits of an element, and its largest relative rounding error, half a step. By torch's names.
ELEMENTS: dict[str, tuple[int, float]] = {
    "float32": (32, 2.0**-24),
    "float16": (16, 2.0**-11),
    "bfloat16": (16, 2.0**-8),
    "float8_e4m3fn": (8, 2.0**-4),
    "float8_e5m2": (8, 2.0**-3),
    "float4_e2m1fn_x2": (4, 2.0**-2),
}

#: Bytes of a block's scale. A power of two is the scale of the MX forms.
SCALES = {"float32": 4, "float8_e4m3fn": 1, "float8_e8m0fnu": 1}

#: Dtypes of the numbers themselves, and so the elements of a codec without scales.
VALUES = ("float32", "float16", "bfloat16")

#: Largest rounding error in a scaled block, relative to the block's largest number: half the widest step of
#: the element against its largest number, plus the error of rounding the scale. 16 / 448, and (1 + 1 / 17) / 6. A power
#: of two may be twice as large as it need be, and the widest step is used up to 7/4 and 3/2 of it: 7/4 * 16 / 448, and
#: 3/2 / 6.
_BLOCK_ERRORS = {
    ("float8_e4m3fn", "float32"): 0.036,
    ("float8_e4m3fn", "float8_e8m0fnu"): 0.0625,
    ("float4_e2m1fn_x2", "float8_e4m3fn"): 0.177,
    ("float4_e2m1fn_x2", "float8_e8m0fnu"): 0.25,
}

#: Parts of a row, and values of one: more than any row has. They bound the work that a peer's message can cause.
MAX_PARTS, MAX_VALUES = 8, 1 << 20


@dataclass(frozen=True, slots=True)
class CodecPart:
    """A part of a row: `values` numbers in one form, their elements followed by a scale for each `block` of them.

    `block`: 0 if the row has no scales. A number is its element, times its block's scale, times the plane's own scale
    if `is_scaled`. Two float4 share a byte, the first in its low half. Raises LayoutError for an unknown form.

    >>> CodecPart(512, "float8_e4m3fn", 128, "float32").nbytes, CodecPart(64, "bfloat16").nbytes
    (528, 128)
    """

    values: int
    element: str
    block: int = 0
    scale: str = ""

    def __post_init__(self) -> None:
        settle_whole(self, "part of a row", LayoutError, values=1, block=0)
        if self.element not in ELEMENTS or self.values > MAX_VALUES:
            known = f"at most {MAX_VALUES} values, in {', '.join(ELEMENTS)}"
            raise LayoutError(f"a part of {self.values} values in {self.element!r}; {known}")
        form = (self.element, self.scale)
        plain = self.element in VALUES or self.element in ("float8_e4m3fn", "float8_e5m2")
        if not ((plain and not self.block and not self.scale) or (self.block and form in _BLOCK_ERRORS)):
            known = ", ".join(f"{scale} for {element}" for element, scale in _BLOCK_ERRORS)
            raise LayoutError(
                f"a part in {self.element} with {self.scale or 'no'} scales for {self.block} values; known are {known}"
            )
        if self.block and (self.block & (self.block - 1) or self.values % self.block or self.block < 2):
            raise LayoutError(f"{self.values} values in blocks of {self.block}; a power of two that divides them")

    @property
    def element_bytes(self) -> int:
        """The bytes of all elements; a float4 takes half a byte."""
        return self.values * ELEMENTS[self.element][0] // 8

    @property
    def nbytes(self) -> int:
        """The bytes of elements and scales."""
        scales = self.values // self.block * SCALES[self.scale] if self.block else 0
        return self.element_bytes + scales

    @property
    def is_scaled(self) -> bool:
        """True if each plane has a scale for this part beside the pages: k_scale, v_scale, or NVFP4's global one."""
        return self.element not in VALUES and self.scale in ("", "float8_e4m3fn")

    @property
    def error(self) -> float:
        """The largest rounding error, relative to the number, or to the largest of its block if it has one.

        It holds within the scale's range: numbers beyond are clipped, and numbers far below lose digits.
        """
        return _BLOCK_ERRORS[self.element, self.scale] if self.block else ELEMENTS[self.element][1]

    def text(self) -> str:
        """Returns `512 float8_e4m3fn by 128`."""
        return f"{self.values} {self.element}" + (f" by {self.block}" if self.block else "")


@dataclass(frozen=True, slots=True)
class Codec:
    """The form of a component's rows: `parts` one after the other. `values`: the dtype of the numbers themselves.

    Raises LayoutError for unknown values, too many parts, or a misaligned part. The forms of SGLang 0.5.23 and vLLM
    0.33.0 have names:

    >>> Codec.plain("bfloat16", 128).row_bytes, Codec.fp8("bfloat16", 128).row_bytes, Codec.fp8_ds_mla().row_bytes
    (256, 128, 656)
    >>> Codec.nvfp4("bfloat16", 128).row_bytes, Codec.fp8_ds_mla().text()
    (72, '512 float8_e4m3fn by 128 + 64 bfloat16')
    """

    values: str
    parts: tuple[CodecPart, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if self.values not in VALUES or not 0 < len(self.parts) <= MAX_PARTS:
            raise LayoutError(
                f"a codec of {self.values!r} in {len(self.parts)} parts; 1 to {MAX_PARTS} of {', '.join(VALUES)}"
            )
        for part, start in zip(self.parts, self.starts, strict=True):
            for form, size, at in (
                (part.element, ELEMENTS[part.element][0] // 8, start),
                (part.scale, SCALES.get(part.scale, 0), start + part.element_bytes),
            ):
                if size > 1 and at % size:
                    raise LayoutError(f"{part.text()} at byte {at} of a row: {form} lies at multiples of {size}")

    @property
    def width_bytes(self) -> int:
        """The bytes of the widest element or scale, and the alignment of rows: 4 for scales in float32."""
        return max(1, *(max(ELEMENTS[part.element][0] // 8, SCALES.get(part.scale, 0)) for part in self.parts))

    @classmethod
    def plain(cls, values: str, dim: int) -> Codec:
        """Returns the form that stores numbers in their own dtype, without conversion or loss."""
        return cls(values, (CodecPart(dim, values),))

    @classmethod
    def fp8(cls, values: str, *dims: int) -> Codec:
        """Returns e4m3 with a scale a tensor, `--kv-cache-dtype fp8_e4m3`. Several `dims`: K and V
        share a row (vLLM).
        """
        return cls(values, tuple(CodecPart(dim, "float8_e4m3fn") for dim in dims))

    @classmethod
    def fp8_e5m2(cls, values: str, *dims: int) -> Codec:
        """Returns e5m2 with a scale a tensor, `--kv-cache-dtype fp8_e5m2`; `dims` as in `fp8`."""
        return cls(values, tuple(CodecPart(dim, "float8_e5m2") for dim in dims))

    @classmethod
    def mxfp8(cls, values: str, dim: int) -> Codec:
        """Returns e4m3 with a power of two for each 32 behind it."""
        return cls(values, (CodecPart(dim, "float8_e4m3fn", 32, "float8_e8m0fnu"),))

    @classmethod
    def mxfp4(cls, values: str, dim: int) -> Codec:
        """Returns e2m1 with a power of two for each 32 behind it."""
        return cls(values, (CodecPart(dim, "float4_e2m1fn_x2", 32, "float8_e8m0fnu"),))

    @classmethod
    def fp8_ds_mla(cls, latent: int = 512, rope: int = 64) -> Codec:
        """Returns DeepSeek-V3.2's rows of 656 bytes: e4m3 with a float32 scale for each 128, and bfloat16 for RoPE."""
        return cls("bfloat16", (CodecPart(latent, "float8_e4m3fn", 128, "float32"), CodecPart(rope, "bfloat16")))

    @classmethod
    def nvfp4(cls, values: str, dim: int) -> Codec:
        """Returns e2m1 with an e4m3 scale for each 16 behind it, and a scale a tensor."""
        return cls(values, (CodecPart(dim, "float4_e2m1fn_x2", 16, "float8_e4m3fn"),))

    @property
    def dim(self) -> int:
        """The numbers of a row."""
        return sum(part.values for part in self.parts)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row with its scales."""
        return sum(part.nbytes for part in self.parts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first byte of each part."""
        return tuple(accumulate((part.nbytes for part in self.parts[:-1]), initial=0))

    @property
    def scales(self) -> int:
        """The number of scales that each plane has beside the pages: one for each part that `is_scaled`."""
        return sum(part.is_scaled for part in self.parts)

    def text(self) -> str:
        """Describe the parts: `512 float8_e4m3fn by 128 + 64 bfloat16`."""
        return " + ".join(part.text() for part in self.parts)


def cut_block(one: Codec, other: Codec) -> CodecPart | None:
    """Returns a part with a block that a part border of the other codec cuts, which no kernel reads; None: every block
    is whole.

    >>> cut_block(Codec.fp8("bfloat16", 8, 120), Codec.nvfp4("bfloat16", 128)).block
    16
    """
    for held, kept in ((one, other), (other, one)):
        edges, begun = set(accumulate(part.values for part in held.parts)), 0
        for part in kept.parts:
            inside = (edge - begun for edge in edges if begun < edge < begun + part.values)
            if part.block and any(edge % part.block for edge in inside):
                return part
            begun += part.values
    return None


@lru_cache(maxsize=256)
def error_of(held: Codec, kept: Codec) -> float:
    """Returns the largest `CodecPart.error` of rounding rows `held` to the form `kept`; 0: lossless.

    Both scales are taken as equal where the forms are. A scaled number has more digits than bfloat16 keeps.
    """
    found, at = 0.0, 0
    while at < kept.dim:
        (theirs, begun), (ours, own_begun) = _part_at(held, at), _part_at(kept, at)
        stop = min(begun + theirs.values, own_begun + ours.values)
        same = (theirs.element, theirs.block) == (ours.element, ours.block)
        aligned = not ours.block or (begun - own_begun) % ours.block == 0
        if not (same and aligned) and not _holds(theirs.element, ours.element):
            found = max(found, ours.error)
        at = stop
    return found


def _holds(element: str, other: str) -> bool:
    """Returns True if every unscaled number in `element` is exact in `other` too."""
    return element in VALUES and other == "float32"


def _part_at(codec: Codec, value: int) -> tuple[CodecPart, int]:
    """Returns the part with this value of a row, and the part's first value."""
    first = 0
    for part in codec.parts:
        if value < first + part.values:
            return part, first
        first += part.values
    raise LayoutError(f"value {value} of a row of {codec.dim}")


def named(name: str, values: str, dims: Sequence[int]) -> Codec:
    """Returns the form that engines call `name`, for rows of `sum(dims)` numbers. Raises LayoutError for an unknown
    name.

    >>> named("fp8_ds_mla", "bfloat16", [576]).row_bytes, named("auto", "bfloat16", [128]).text()
    (656, '128 bfloat16')
    """
    dim = sum(dims)
    if name in ("auto", values):
        return Codec.plain(values, dim)
    if name in ("fp8", "fp8_e4m3"):
        return Codec.fp8(values, *dims)
    if name == "fp8_e5m2":
        return Codec.fp8_e5m2(values, *dims)
    if name in _OF_A_ROW:
        return _OF_A_ROW[name](values, dim)
    if name == "fp8_ds_mla" and dim > 64:
        return Codec.fp8_ds_mla(dim - 64)
    if name in VALUES:
        return Codec(values, (CodecPart(dim, name),))
    raise LayoutError(f"unknown form {name!r} of a row of {dim} {values}; known are {', '.join(FORMS)}")


#: Forms in which all numbers of a row are one part.
_OF_A_ROW = {"nvfp4": Codec.nvfp4, "mxfp8": Codec.mxfp8, "mxfp4": Codec.mxfp4}

#: The names that `named` takes.
FORMS = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", *_OF_A_ROW, *VALUES)
