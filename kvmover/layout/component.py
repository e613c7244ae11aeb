"""A Component is one family of cache tensors of a model, by its logical axes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvmover.errors import LayoutError
from kvmover.fields import settle_whole, whole
from kvmover.layout.codec import VALUES, Codec

#: Bytes of an element, by torch's name of the dtype. Moves treat elements as opaque: where two FP4 values share a
#: byte, the pair is the element, as torch has it.
DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}


def _dtype(given: object) -> str:
    """Returns torch's name of a dtype, given by name or as torch's or NumPy's own. Raises LayoutError if unknown."""
    name = given.__name__ if isinstance(given, type) else str(getattr(given, "name", given)).removeprefix("torch.")
    if name not in DTYPE_BYTES or not (isinstance(given, str | type) or type(given).__name__.lower().endswith("dtype")):
        raise LayoutError(f"unknown dtype {given!r}; known are {', '.join(DTYPE_BYTES)}")
    return name


@dataclass(frozen=True, slots=True)
class Component:
    """One family of cache rows, by its extents in the whole model: `layer x kv x head x position x dim`.

    Attention has `kv=2`; a latent that serves as key and value has `kv=1, heads=1`, the only difference between them.

    `window`: only so many positions before the end of a request matter (None: all do). Page tables still begin where
    the request does; entries before the window are never read.

    `states`: 0 is a row a token; n is n rows a request, whatever its length. They are then the component's positions,
    in pages of one, and every context-parallel rank holds them all.

    `row_tokens`: tokens that share a row, mostly 1. A compressed cache has a row of every 4 or 128 tokens; a hybrid
    that saves its state every 256 tokens has a row of those. Rows are then the component's positions; the row of tokens
    [r * n, r * n + n) exists once the last of them is computed, so tokens beyond the last full row have none.

    `dtype`: torch's name; torch's and NumPy's own dtypes are accepted.

    `codec`: form of the numbers in these rows, if it is known and differs from `dtype`; None: stored in `dtype`.

    Raises LayoutError for extents below 1, a window together with states, or a codec with rows of another size.
    """

    name: str
    layers: int
    kv: int
    heads: int
    dim: int
    dtype: str
    window: int | None = None
    states: int = 0
    row_tokens: int = 1
    codec: Codec | None = None

    def __post_init__(self) -> None:
        what = f"component {self.name}"
        settle_whole(self, what, LayoutError, layers=1, kv=1, heads=1, dim=1, states=0, row_tokens=1)
        object.__setattr__(self, "dtype", _dtype(self.dtype))
        if self.window is not None:
            object.__setattr__(self, "window", whole(self.window, f"{what} has window", LayoutError, 1))
        if self.window is not None and self.states:
            raise LayoutError(f"component {self.name} has a window of {self.window} and {self.states} states; not both")
        if self.states and self.row_tokens > 1:
            held = f"{self.states} states and a row every {self.row_tokens} tokens"
            raise LayoutError(f"component {self.name} has {held}; not both")
        if self.codec is not None and self.codec.row_bytes != self.row_bytes:
            raise LayoutError(
                f"{what} has rows of {self.row_bytes} bytes; {self.codec.text()} takes {self.codec.row_bytes}"
            )

    def __hash__(self) -> int:
        """Hash two fields only: caches keyed by a component are looked up several times a request."""
        return hash((self.name, self.layers))

    @classmethod
    def attention(cls, layers: int, kv_heads: int, head_dim: int, dtype: str) -> Component:
        """Returns keys and values of multi-head, grouped-query or multi-query attention."""
        return cls("attention", layers, 2, kv_heads, head_dim, dtype)

    @classmethod
    def mla(cls, layers: int, latent_dim: int, dtype: str) -> Component:
        """Returns the latent of MLA: `latent_dim = kv_lora_rank + rope`, 576 for DeepSeek-V3."""
        return cls("mla", layers, 1, 1, latent_dim, dtype)

    @classmethod
    def sliding(cls, layers: int, kv_heads: int, head_dim: int, window: int, dtype: str) -> Component:
        """Returns keys and values of layers that attend to the last `window` positions only: 128 for gpt-oss."""
        return cls("sliding", layers, 2, kv_heads, head_dim, dtype, window)

    @classmethod
    def state(cls, name: str, layers: int, heads: int, dim: int, dtype: str, states: int = 1) -> Component:
        """Returns state-space states, split by head: `states` rows a request instead of one a token.

        The temporal state of Mamba-2 has `dim = head_dim * state_size`, 8,192 for 64 x 128. A convolution state holds
        sub-projections side by side, q, k and v or x, B and C, each split by head on its own: so it is one component a
        sub-projection, `dim = channels of a head * (kernel - 1)`, whose pools are views of the one allocation (see
        `PoolSpec`). An engine that stores the kernel - 1 steps outermost has them as planes: `kv = kernel - 1`.
        """
        return cls(name, layers, 1, heads, dim, dtype, states=states)

    def wanted(self, positions: range) -> range:
        """Returns the component's own positions that must move for tokens `positions` of a request.

        With a window, the last positions before `stop`; with states, all states, if there is any token. Consecutive
        ranges contain every row once, wherever they are cut. Raises LayoutError for a range with a step:

        >>> full, sliding = Component.attention(1, 8, 64, "bfloat16"), Component.sliding(1, 8, 64, 128, "bfloat16")
        >>> [component.wanted(range(64, 1000)) for component in (full, sliding)]
        [range(64, 1000), range(872, 1000)]
        >>> temporal = Component.state("temporal", 24, 128, 64 * 128, "float32")
        >>> temporal.wanted(range(64, 1000)), temporal.wanted(range(64, 64)), sliding.wanted(range(960, 1000))
        (range(0, 1), range(0, 0), range(960, 1000))
        >>> compressed = Component("c4", 30, 1, 1, 584, "uint8", row_tokens=4)
        >>> compressed.wanted(range(0, 66)), compressed.wanted(range(66, 1000)), compressed.wanted(range(2))
        (range(0, 16), range(16, 250), range(0, 0))
        """
        if positions.step != 1:
            raise LayoutError(f"positions {positions} of {self.name} are not consecutive")
        if not positions:
            return range(0)
        first = positions.start if self.window is None else positions.stop - self.window
        return self.rows(range(max(positions.start, first), positions.stop))

    def rows(self, tokens: range) -> range:
        """Returns the component's own positions that are completed by `tokens`; or all the states."""
        each = self.row_tokens
        return range(self.states) if self.states else range(tokens.start // each, tokens.stop // each)

    def extent(self, tokens: int) -> int:
        """Returns its number of positions in a request of `tokens`: 250 rows of 4 in 1,003 tokens; or the states."""
        return self.states or tokens // self.row_tokens

    def cp_parts(self, cp: int) -> int:
        """Returns into how many parts `cp` context-parallel ranks divide positions: 1 where each rank holds all."""
        return 1 if self.states else cp

    def kept_as(self, codec: Codec) -> Component:
        """Returns the same numbers in another form, as rows of bytes. Raises LayoutError if the codec is of other
        numbers.

        >>> Component.mla(61, 576, "bfloat16").kept_as(Codec.fp8_ds_mla()).row_bytes
        656
        """
        meant = self.meant
        if (codec.values, codec.dim) != (meant.dtype, meant.dim):
            raise LayoutError(f"{self.name} has rows of {meant.dim} {meant.dtype}; {codec.text()} is of other numbers")
        if codec == Codec.plain(codec.values, codec.dim):
            return meant
        return replace(self, dim=codec.row_bytes, dtype="uint8", codec=codec)

    @property
    def meant(self) -> Component:
        """The component with its numbers in their own dtype: the same on both sides of a transfer."""
        return self if self.codec is None else replace(self, dim=self.codec.dim, dtype=self.codec.values, codec=None)

    @property
    def form(self) -> Codec | None:
        """The form of its rows; None for opaque bytes."""
        return self.codec or (Codec.plain(self.dtype, self.dim) if self.dtype in VALUES else None)

    @property
    def element_bytes(self) -> int:
        """The bytes of one element: 2 for bfloat16."""
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """The bytes of one (layer, kv, head, position)."""
        return self.dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """The bytes of one position over all layers, heads and kv: 327,680 for Llama-3-70B in bfloat16."""
        return self.layers * self.kv * self.heads * self.row_bytes
