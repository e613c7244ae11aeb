"""Component: one family of cache tensors of a model, by its logical axes."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.errors import LayoutError

#: Bytes of an element, by torch's name of the dtype. Moves never look inside an element.
DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True, slots=True)
class Component:
    """Whole-model extents of one family of cache rows: `layer x kv x head x position x dim`.

    Attention has `kv=2`; a latent that serves as key and value has `kv=1, heads=1`. Nothing else tells them apart.
    """

    name: str
    layers: int
    kv: int
    heads: int
    dim: int
    dtype: str

    def __post_init__(self) -> None:
        for field in ("layers", "kv", "heads", "dim"):
            if getattr(self, field) < 1:
                raise LayoutError(f"component {self.name} has {field} = {getattr(self, field)}; it must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPE_BYTES)}")

    @classmethod
    def attention(cls, layers: int, kv_heads: int, head_dim: int, dtype: str) -> Component:
        """Keys and values of multi-head, grouped-query or multi-query attention."""
        return cls("attention", layers, 2, kv_heads, head_dim, dtype)

    @classmethod
    def mla(cls, layers: int, latent_dim: int, dtype: str) -> Component:
        """The latent of multi-head latent attention: `latent_dim = kv_lora_rank + rope`, 576 for DeepSeek-V3."""
        return cls("mla", layers, 1, 1, latent_dim, dtype)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one (layer, kv, head, position)."""
        return self.dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one position over all layers, heads and kv: 327,680 for Llama-3-70B in bfloat16."""
        return self.layers * self.kv * self.heads * self.row_bytes
