"""A StoredPlane lets the demo's model read and write numbers where a pool stores them in another form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmover.kernels.convert_reference import decode, encode
from kvmover.layout.codec import Codec

#: Page ids and tokens in those pages, as tensor indices.
Where = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class StoredPlane:
    """A plane `rows` [page, token, head, byte] in a form, with scales of 1, read as float64 numbers."""

    rows: Tensor
    form: Codec

    @property
    def device(self) -> torch.device:
        """Returns the device of the rows."""
        return self.rows.device

    def __getitem__(self, where: Where) -> Tensor:
        return as_numbers(self.rows[where].cpu(), self.form).double()

    def __setitem__(self, where: Where, numbers: Tensor) -> None:
        flat = numbers.float().cpu().flatten(0, -2)
        stored = encode(self.form, flat, [1.0] * self.form.scales)
        self.rows[where] = stored.view(*numbers.shape[:-1], -1).to(self.device)


def as_numbers(rows: Tensor, form: Codec) -> Tensor:
    """Convert rows [.., byte] to numbers [.., dim] in float32."""
    flat = rows.contiguous().flatten(0, -2)
    return decode(form, flat, [1.0] * form.scales).view(*rows.shape[:-1], -1)


def restored(rows: Tensor, held: Codec, kept: Codec) -> Tensor:
    """Convert rows [.., byte] from form `held` to form `kept`, by the definition."""
    if held == kept:
        return rows
    numbers = as_numbers(rows, held)
    return encode(kept, numbers.flatten(0, -2), [1.0] * kept.scales).view(*rows.shape[:-1], -1)
